"""A checkpoint of several ranks: what they have alike is kept once, what differs under the rank that has it.

The first rank's state is the state of the checkpoint. Of each further one the manifest has the position, and
those parts whose words are others than the first rank's; its tensors stand under `ranks/1/` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from unbroken.checkpoint.manifest import TensorEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.state.paths import part_of
from unbroken.state.tensors import HostTensor
from unbroken.state.tree import Json

# No part may have this name.
RANKS = "ranks"
_POSITION = "position"


def path_of_rank(rank: int, path: str) -> str:
    """Return where the tensor at `path` of a further rank is kept."""
    return f"{RANKS}/{rank}/{path}"


@dataclass(frozen=True, slots=True)
class CheckpointOfRank(Checkpoint):
    """A checkpoint as one of its ranks has left it; `origins` are the places in it, where they are others."""

    whole: Checkpoint
    origins: Mapping[str, str] = field(default_factory=dict)

    def load_tensors(self, paths: Iterable[str] | None = None) -> dict[str, HostTensor]:
        places = {
            path: self.origins.get(path, path) for path in (self.manifest.tensors if paths is None else paths)
        }
        found = self.whole.load_tensors(places.values())
        return {path: found[place] for path, place in places.items()}

    def load_into(self, memory: Mapping[str, memoryview]) -> None:
        self.whole.load_into({self.origins.get(path, path): view for path, view in memory.items()})


def of_rank(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """Return `checkpoint` as `rank` has left it; of one that there was not, as the first rank has."""
    manifest = checkpoint.manifest
    if not manifest.ranks:
        return checkpoint
    shared = {path: entry for path, entry in manifest.tensors.items() if part_of(path) != RANKS}
    if not 0 < rank <= len(manifest.ranks):
        seen = msgspec.structs.replace(manifest, tensors=shared, ranks=())
        return CheckpointOfRank(checkpoint.storage, checkpoint.name, seen, checkpoint)
    entry = manifest.ranks[rank - 1]
    prefix = path_of_rank(rank, "")
    own = {path.removeprefix(prefix): path for path in manifest.tensors if path.startswith(prefix)}
    # What the first rank has in these, and this one has not.
    others = {_POSITION, *entry.parts}
    named = {place for part in entry.parts.values() for place in references(part.state)}
    tensors = {path: one for path, one in shared.items() if part_of(path) not in others or path in named}
    tensors |= {path: _with_ties(manifest.tensors[place], shared.get(path)) for path, place in own.items()}
    seen = msgspec.structs.replace(
        manifest, parts={**manifest.parts, **entry.parts}, position=entry.position, tensors=tensors, ranks=()
    )
    return CheckpointOfRank(checkpoint.storage, checkpoint.name, seen, checkpoint, own)


def references(encoded: Json) -> Iterator[str]:
    """Yield the paths of the tensors that an encoded state refers to."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from references(item)
    elif isinstance(encoded, dict):
        if "$tensor" in encoded:
            yield str(encoded["$tensor"])
        else:
            for item in encoded.values():
                yield from references(item)


def _with_ties(own: TensorEntry, shared: TensorEntry | None) -> TensorEntry:
    # What is tied is so on all ranks.
    return own if shared is None else msgspec.structs.replace(own, aliases=shared.aliases)
