"""A checkpoint as today's program is to see it: under other names, where the user gave a map of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from unbroken.checkpoint.manifest import Manifest, TensorEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import UsageError
from unbroken.state.handlers import ORDER_MODULE, Renamed, RenamesState, StateHandler
from unbroken.state.paths import part_of
from unbroken.state.references import with_references
from unbroken.state.renaming import Rename, renaming
from unbroken.state.tensors import HostTensor

__all__ = ["AdaptedCheckpoint", "Rename", "adapt", "renaming"]


@dataclass(frozen=True, slots=True)
class AdaptedCheckpoint:
    """A checkpoint whose `manifest` has new names; `origins` gives for new paths those in its files."""

    checkpoint: Checkpoint
    manifest: Manifest
    origins: Mapping[str, str]

    def load_tensors(self, paths: Iterable[str]) -> dict[str, HostTensor]:
        """Return `path -> tensor`, each verified. Raises DamagedError."""
        wanted = {path: self.origins.get(path, path) for path in paths}
        found = self.checkpoint.load_tensors(wanted.values())
        return {path: found[origin] for path, origin in wanted.items()}

    def load_into(self, memory: Mapping[str, memoryview]) -> None:
        """Fill `memory`, by paths, with the bytes of tensors, each verified. Raises DamagedError."""
        self.checkpoint.load_into({self.origins.get(path, path): view for path, view in memory.items()})


def adapt(
    checkpoint: Checkpoint, handlers: Mapping[str, StateHandler], rename: Mapping[Any, str]
) -> AdaptedCheckpoint:
    """Return `checkpoint` with its names mapped by `rename`; `handlers` are those of the live parts.

    Raises UsageError for a map that gives two things one name.
    """
    seen = AdaptedCheckpoint(checkpoint, checkpoint.manifest, {})
    if not rename:
        return seen
    of_parts = {old: new for old, new in rename.items() if old in checkpoint.manifest.parts}
    seen = _with_parts_renamed(seen, of_parts)
    new_name, parts_before = renaming(rename), {new: old for old, new in of_parts.items()}
    for part, handler in handlers.items():
        entry = seen.manifest.parts.get(part)
        if entry and isinstance(handler, RenamesState) and handler.name == entry.handler:
            below = part if handler.order == ORDER_MODULE else None
            of_this = _below(below, parts_before.get(part, part), new_name)
            seen = _with_state(seen, part, handler.renamed(part, entry.state, of_this))
    return seen


def _below(part: str | None, before: str, new_name: Rename) -> Rename:
    """Return `new_name` for names below `part`, which was called `before`; without it, for all names."""
    if part is None:
        return new_name
    return lambda name: new_name(before + name[len(part) :])


def _with_parts_renamed(seen: AdaptedCheckpoint, names: Mapping[str, str]) -> AdaptedCheckpoint:
    parts = {names.get(part, part): entry for part, entry in seen.manifest.parts.items()}
    if len(parts) < len(seen.manifest.parts):
        raise _collision("parts", names)
    moved = {
        path: names[part] + path[len(part) :]
        for first, entry in seen.manifest.tensors.items()
        for path in (first, *entry.aliases)
        if (part := part_of(path)) in names
    }
    manifest = msgspec.structs.replace(seen.manifest, parts=parts)
    return _with_paths(replace(seen, manifest=manifest), moved)


def _with_state(seen: AdaptedCheckpoint, part: str, renamed: Renamed) -> AdaptedCheckpoint:
    entry = msgspec.structs.replace(seen.manifest.parts[part], state=renamed.state)
    manifest = msgspec.structs.replace(seen.manifest, parts={**seen.manifest.parts, part: entry})
    return _with_paths(replace(seen, manifest=manifest), renamed.paths)


def _with_paths(seen: AdaptedCheckpoint, moved: Mapping[str, str]) -> AdaptedCheckpoint:
    """Return `seen` with other paths for the tensors, everywhere that they are referred to."""
    if not moved:
        return seen
    tensors, origins = dict[str, TensorEntry](), dict[str, str]()
    for path, entry in seen.manifest.tensors.items():
        new = moved.get(path, path)
        aliases = tuple(moved.get(alias, alias) for alias in entry.aliases)
        tensors[new] = msgspec.structs.replace(entry, aliases=aliases)
        origins[new] = seen.origins.get(path, path)
    if len(tensors) < len(seen.manifest.tensors):
        raise _collision("tensors", moved)
    parts = {
        part: msgspec.structs.replace(entry, state=with_references(entry.state, moved))
        for part, entry in seen.manifest.parts.items()
    }
    manifest = msgspec.structs.replace(seen.manifest, tensors=tensors, parts=parts)
    return AdaptedCheckpoint(seen.checkpoint, manifest, origins)


def _collision(what: str, moved: Mapping[str, str]) -> UsageError:
    doubled = sorted(new for new, count in Counter(moved.values()).items() if count > 1) or list(
        moved.values()
    )
    return UsageError(
        f"Run: expected a rename= that keeps {what} apart, found several that become {doubled[0]!r}",
        hint="map each name of the checkpoint to one of its own",
    )
