"""The live objects that a rehearsal looks at: the parts of the run, and what is found beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.discovery import Found, discover, script_modules, script_roots
from unbroken.frameworks.generator_part import GeneratorHandler
from unbroken.frameworks.places import GoneError, Roots
from unbroken.state.handlers import ORDER_GENERATOR, ORDER_VALUE, StateHandler
from unbroken.state.paths import part_of
from unbroken.state.python import ContainerHandler, StateDictHandler
from unbroken.state.table import TensorTable
from unbroken.state.tensors import TensorSource
from unbroken.state.tree import Encoder, Json, LeafCodec, join
from unbroken.training import families
from unbroken.training.part import Part, encode_parts
from unbroken.training.randomness import GlobalRandomness
from unbroken.training.rehearsal_components import Component, components

FOUND = "found"
# More would slow the script down: the largest are left out.
_MOST_FOUND_BYTES = 256 << 20
_WHOLES: dict[str, tuple[str, ...]] = {"process.rng": ("*", "held/*"), "generator": ("",)}
_ORDERED = frozenset({"python.container", "python.state_dict"})
_STATE_DICT = "python.state_dict"


@dataclass(frozen=True, slots=True)
class Taken:
    """An object's state of now: encoded, with its tensors, and in components."""

    name: str
    state: Json
    sources: Mapping[str, TensorSource]
    components: Sequence[Component]


def take_parts(parts: Sequence[Part], *, inside_step: bool) -> list[Taken]:
    """Return the states of the parts."""
    table = TensorTable()
    entries = encode_parts(parts, table, inside_step=inside_step)
    of_part: dict[str, dict[str, TensorSource]] = {part.name: {} for part in parts}
    for path, source in table.sources.items():
        of_part[part_of(path)][path] = source
    return [
        Taken(
            part.name,
            entries[part.name].state,
            of_part[part.name],
            components(
                part.name,
                entries[part.name].state,
                of_part[part.name],
                wholes=_WHOLES.get(part.handler.name, ()),
                ordered=part.handler.name in _ORDERED,
            ),
        )
        for part in parts
    ]


class HoldsGenerators(Protocol):
    """The position in the data, whose loaders hold generators."""

    def generators(self) -> list[object]: ...


class FoundObjects:
    """Objects of the script that are in no part: found once, when this is made, and looked at each time.

    Generators of loaders are left out once their loader is met: the position keeps them, and restores them
    when their next pass begins.
    """

    def __init__(self, parts: Sequence[Part], position: HoldsGenerators) -> None:
        self._modules = script_modules()
        discovery = discover(script_roots(self._modules), _known(parts))
        self._found = discovery.found
        self._position = position
        self.notes = list(discovery.notes)
        self._left_out: set[str] = set()

    def take(self, known: Sequence[Taken]) -> list[Taken]:
        """Return the states of what is there; tensors that are in `known` belong there."""
        theirs = {source.identity for taken in known for source in taken.sources.values()}
        # Of copies, such as the states of generators, it is not known.
        theirs.discard(None)
        held = {id(generator) for generator in self._position.generators()}
        live, result, codecs = script_roots(self._modules), [], families.codecs()
        for found in self._found:
            taken = self._take(found, live, theirs, held, codecs)
            if taken is not None:
                result.append(taken)
        return self._within_bounds(result)

    def put(self, name: str, state: Any) -> None:
        """Put a decoded state into the object of that name; raises GoneError if it cannot be."""
        live, found = script_roots(self._modules), self._named(name)
        value = found.place.look(live)
        codecs = families.codecs()
        handler = _handler(found, value, codecs)
        if handler is not None:
            differences = handler.differences(value, state)
            if not differences:
                handler.restore(value, state)
                return
        if found.kind != "plain":
            raise GoneError("; ".join(str(item) for item in differences))
        if not any(codec.assign(value, state) for codec in codecs):
            found.place.put(live, state)

    def order(self, name: str) -> int:
        """Return when, among all objects, the one of that name is to be put."""
        return ORDER_GENERATOR if self._named(name).kind == "generator" else ORDER_VALUE

    def _named(self, name: str) -> Found:
        return next(found for found in self._found if join(FOUND, found.name) == name)

    def _take(
        self, found: Found, live: Roots, theirs: set[Any], held: set[int], codecs: Sequence[LeafCodec]
    ) -> Taken | None:
        try:
            value = found.place.look(live)
        except GoneError:
            return None
        if id(value) in held:
            return None
        name = join(FOUND, found.name)
        handler, table = _handler(found, value, codecs), TensorTable()
        try:
            state = value if handler is None else handler.state(value)
            encoded = Encoder(table, codecs).encode(state, name)
        except UnsupportedStateError as error:
            self._leave_out(name, error.message)
            return None
        sources = {path: source for path, source in table.sources.items() if source.identity not in theirs}
        # As a whole: it is the object that is not kept, whatever is in it.
        return Taken(name, encoded, table.sources, components(name, encoded, sources, wholes=("",)))

    def _within_bounds(self, result: list[Taken]) -> list[Taken]:
        sizes = {taken.name: sum(piece.size_bytes for piece in taken.components) for taken in result}
        room, kept = _MOST_FOUND_BYTES, set()
        for name in sorted(sizes, key=lambda name: (sizes[name], name)):
            room -= sizes[name]
            if room >= 0:
                kept.add(name)
            else:
                self._leave_out(name, f"{sizes[name]:,} bytes, more than are looked at in each step")
        return [taken for taken in result if taken.name in kept]

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            self.notes.append(f"not looked at: {name}: {reason}")


def _handler(found: Found, value: object, codecs: Sequence[LeafCodec]) -> StateHandler | None:
    if found.kind == "generator":
        return GeneratorHandler()
    if found.kind == "stateful":
        return StateDictHandler()
    containers = ContainerHandler(codecs)
    return containers if containers.accepts(value) else None


def _known(parts: Sequence[Part]) -> set[int]:
    """Return the ids of the objects that are in parts; what keeps its own state may leave some of it out."""
    return {id(item) for part in parts for item in _covered(part)}


def _covered(part: Part) -> Iterator[object]:
    if isinstance(part.value, GlobalRandomness):
        yield from part.value.held().values()
        return
    if part.handler.name == _STATE_DICT:
        return
    yield part.value
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(part.value, torch.nn.Module):
        yield from part.value.modules()
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(part.value, tensorflow.Module):
        yield from part.value.submodules
