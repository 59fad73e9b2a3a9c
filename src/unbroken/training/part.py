"""One part: a named live object with the handler that knows it. Its state out, as JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.state.choices import matches
from unbroken.state.handlers import (
    ComparesSettings,
    KeepsGradients,
    ListsSettings,
    Setting,
    StateHandler,
    TensorFacts,
    tensor_facts,
)
from unbroken.state.references import with_references
from unbroken.state.table import TensorTable
from unbroken.state.tensors import LoadedTensor, TensorSource, bytes_of
from unbroken.state.tree import Decoder, Encoder, join
from unbroken.training import families
from unbroken.training.comparison import lies_in
from unbroken.training.randomness import RNG_PART


@dataclass(frozen=True, slots=True)
class Part:
    """A live object of a run, its name and its handler."""

    name: str
    value: object
    handler: StateHandler

    @property
    def tensors(self) -> TensorFacts:
        """What the handler says of the tensors of this part."""
        return tensor_facts(self.handler)

    @property
    def class_name(self) -> str:
        """The class of the object. Without its module: a script is `__main__`, and may be imported."""
        return type(self.value).__qualname__

    def settings(self, state: Any) -> list[Setting]:
        """Return what the script set otherwise than `state`."""
        handler = self.handler
        return handler.changed_settings(self.value, state) if isinstance(handler, ComparesSettings) else []

    def script_settings(self) -> list[Setting]:
        """Return all settings that the script may override, if that is known."""
        handler = self.handler
        return handler.script_settings(self.value) if isinstance(handler, ListsSettings) else []


def encode_parts(
    parts: Iterable[Part], table: TensorTable, *, inside_step: bool = False
) -> dict[str, PartEntry]:
    """Return the state of every part; its live tensors are entered in `table`, not copied.

    With `inside_step` gradients belong to it: they were gathered for a step that is not complete.
    """
    codecs = families.codecs()
    entries = {}
    for part in parts:
        facts = part.tensors
        if facts.are_trained:
            table.trained_parts.add(part.name)
        encoder = Encoder(table, codecs, keep_aliases=facts.are_tied)
        entries[part.name] = PartEntry(
            handler=part.handler.name,
            type=f"{type(part.value).__module__}.{type(part.value).__qualname__}",
            state=encoder.encode(_state(part, inside_step), part.name),
        )
    return entries


def decode_part(entry: PartEntry, tensors: Callable[[str], LoadedTensor], *, describes: bool = False) -> Any:
    """Return the state of a part; with `describes` its tensors may have a dtype and a shape only."""
    return Decoder(tensors, families.codecs(describes=describes)).decode(entry.state)


def is_setting(path: str, pattern: str) -> bool:
    """Tell whether the tensor at `path` is one of the settings of its part, compared before they are set."""
    return bool(pattern) and matches(path.partition("/")[2], [pattern])


def unequal(
    entries: Mapping[str, PartEntry],
    sources: Mapping[str, TensorSource],
    manifest: Manifest,
    verified: Mapping[str, int] | None = None,
    inexact: Container[str] = (),
    excused: Collection[str] = (),
) -> list[str]:
    """Return the places in states, and the tensors, that are not what the manifest says, sorted.

    A tensor at the address that is in `verified` for its path was digested there already. Of parts that
    are `inexact` only the tensors are compared. What stands at or below one of `excused` may differ.
    """
    known = verified or {}
    # Which of its names a tied weight is met under first may have changed with the order of the code.
    first = {alias: path for path, entry in manifest.tensors.items() for alias in entry.aliases}
    wrong = [
        place
        for name, entry in entries.items()
        if name not in inexact
        for place in _differing(
            _renamed(_known(name, entry.state, manifest), first),
            _renamed(manifest.parts[name].state, first),
            name,
        )
    ]
    for path, source in sources.items():
        entry = manifest.tensors.get(first.get(path, path))
        if entry is None or (path in known and source.address == known[path]):
            continue
        # Bytes alone do not tell a tensor of one element from a scalar.
        is_alike = (source.dtype, source.shape) == (entry.dtype, tuple(entry.shape))
        if not is_alike or digest(bytes_of(source), manifest.digest_algorithm) != entry.digest:
            wrong.append(path)
    return sorted(place for place in wrong if not lies_in(place, excused))


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


def _differing(mine: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield the places at which two encoded states differ, as deep as paths lead."""
    if _bytes_of(mine) == _bytes_of(theirs):
        return
    if _has_names(mine) and _has_names(theirs):
        for key in mine.keys() | theirs.keys():
            if key in mine and key in theirs:
                yield from _differing(mine[key], theirs[key], join(path, key))
            else:
                yield join(path, key)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _differing(one, other, f"{path}/{index}")
    else:
        yield path


def _renamed(encoded: Any, names: Mapping[str, str]) -> Any:
    return with_references(encoded, names) if names else encoded


def _has_names(encoded: Any) -> bool:
    return isinstance(encoded, dict) and not any(key.startswith("$") for key in encoded)


def _bytes_of(encoded: Any) -> bytes:
    # The text, not the value: 1 is not 1.0 there.
    return msgspec.json.encode(encoded, order="sorted")
