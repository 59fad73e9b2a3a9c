"""One part: a named live object with the handler that knows it. Its state out, as JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.state.handlers import ComparesSettings, KeepsGradients, Setting, StateHandler
from unbroken.state.references import with_references
from unbroken.state.tensors import LoadedTensor, TensorSource, bytes_of
from unbroken.state.tree import Decoder, Encoder, TensorTable
from unbroken.training import families
from unbroken.training.randomness import RNG_PART

# Tensors of the same memory are tied weights here; elsewhere they are a coincidence of the moment.
_TYING = frozenset({"torch.module"})
# Handlers of these names take over tensors that are filled later, their live ones where those fit; the
# tensors of other parts are read at once and kept until training goes on.
_STREAMED = frozenset({"torch.module", "torch.optimizer", "torch.tensor"})
# And these put them in place as they are: what was digested there need not be digested again.
_PLACED = frozenset({"torch.optimizer"})


@dataclass(frozen=True, slots=True)
class Part:
    """A live object of a run, its name and its handler."""

    name: str
    value: object
    handler: StateHandler

    @property
    def is_streamed(self) -> bool:
        """True if its tensors may be read when they have a place already."""
        return self.handler.name in _STREAMED

    @property
    def is_placed(self) -> bool:
        """True if a restore leaves the tensors where they were read to."""
        return self.handler.name in _PLACED

    def settings(self, state: Any) -> list[Setting]:
        """Return what the script set otherwise than `state`."""
        handler = self.handler
        return handler.changed_settings(self.value, state) if isinstance(handler, ComparesSettings) else []


def encode_parts(
    parts: Iterable[Part], table: TensorTable, *, inside_step: bool = False
) -> dict[str, PartEntry]:
    """Return the state of every part; its live tensors are entered in `table`, not copied.

    With `inside_step` gradients belong to it: they were gathered for a step that is not complete.
    """
    codecs = families.codecs()
    entries = {}
    for part in parts:
        encoder = Encoder(table, codecs, keep_aliases=part.handler.name in _TYING)
        entries[part.name] = PartEntry(
            handler=part.handler.name,
            type=f"{type(part.value).__module__}.{type(part.value).__qualname__}",
            state=encoder.encode(_state(part, inside_step), part.name),
        )
    return entries


def decode_part(entry: PartEntry, tensors: Callable[[str], LoadedTensor], *, describes: bool = False) -> Any:
    """Return the state of a part; with `describes` its tensors may have a dtype and a shape only."""
    return Decoder(tensors, families.codecs(describes=describes)).decode(entry.state)


def part_of(path: str) -> str:
    """Return the name of the part that the tensor at `path` belongs to."""
    return path.partition("/")[0]


def unequal(
    entries: Mapping[str, PartEntry],
    sources: Mapping[str, TensorSource],
    manifest: Manifest,
    verified: Mapping[str, int] | None = None,
    inexact: Container[str] = (),
) -> list[str]:
    """Return the parts and tensors whose live state is not what the manifest says, sorted.

    A tensor at the address that is in `verified` for its path was digested there already. Of parts that
    are `inexact` only the tensors are compared.
    """
    known = verified or {}
    # Which of its names a tied weight is met under first may have changed with the order of the code.
    first = {alias: path for path, entry in manifest.tensors.items() for alias in entry.aliases}
    wrong = [
        name
        for name, entry in entries.items()
        if name not in inexact
        and _canonical(_known(name, entry.state, manifest), first)
        != _canonical(manifest.parts[name].state, first)
    ]
    for path, source in sources.items():
        entry = manifest.tensors.get(first.get(path, path))
        if entry is None or (path in known and source.address == known[path]):
            continue
        # Bytes alone do not tell a tensor of one element from a scalar.
        is_alike = (source.dtype, source.shape) == (entry.dtype, tuple(entry.shape))
        if not is_alike or digest(bytes_of(source)) != entry.digest:
            wrong.append(path)
    return sorted(wrong)


def _state(part: Part, inside_step: bool) -> object:
    handler = part.handler
    if inside_step and isinstance(handler, KeepsGradients):
        return handler.state_inside_step(part.value)
    return handler.state(part.value)


def _known(name: str, state: Any, manifest: Manifest) -> Any:
    # A library that came into use since has a generator of which the checkpoint knows nothing.
    if name != RNG_PART:
        return state
    return {key: item for key, item in state.items() if key in manifest.parts[name].state}


def _canonical(encoded: Any, first: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(with_references(encoded, first) if first else encoded, order="sorted")
