"""Values of components in files: written by one rehearsal, and put back into live objects by another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.rundir.rehearsal import read_value, values_key, write_value
from unbroken.state.tensors import HostTensor, TensorSource, bytes_of, copy_bytes
from unbroken.state.tree import Decoder, Json
from unbroken.training import families
from unbroken.training.part import Part
from unbroken.training.rehearsal_components import replaced
from unbroken.training.rehearsal_objects import FoundObjects, Taken


def dump(directory: Path, step: int, taken: Sequence[Taken]) -> None:
    """Write the values of all components as they are at `step`."""
    for one in taken:
        for component in one.components:
            data = [bytes_of(source) for source in component.sources.values()]
            write_value(directory / values_key(step, component.name), component.stored(), data)


@dataclass(slots=True)
class _Wanted:
    """What is to be put into one object: JSON by component, and tensors by path."""

    states: dict[str, Json]
    tensors: dict[str, HostTensor]


class PutBack:
    """Puts values that lie in `directory` for `step` into the live objects, by the names of components."""

    def __init__(self, directory: Path, step: int, names: Sequence[str]) -> None:
        self._directory = directory
        self._step = step
        self._names = names

    def into(self, parts: Sequence[Part], taken: Sequence[Taken], found: FoundObjects) -> list[str]:
        """Put them, generators last; return what cannot be, a line each with the reason."""
        live = {one.name: one for one in taken}
        wanted, notes = self._read(live)
        part_of = {part.name: part for part in parts}
        orders = {
            owner: part_of[owner].handler.order if owner in part_of else found.order(owner)
            for owner in wanted
        }
        for owner in sorted(wanted, key=orders.__getitem__):
            try:
                state = _decoded(live[owner], wanted[owner])
                if owner in part_of:
                    part_of[owner].handler.restore(part_of[owner].value, state)
                else:
                    found.put(owner, state)
            except Exception as error:  # noqa: BLE001 - code of the user's own may raise anything; it is said
                reason = str(error) or type(error).__name__
                notes += [f"cannot put back {name}: {reason}" for name in wanted[owner].states]
        return notes

    def _read(self, live: Mapping[str, Taken]) -> tuple[dict[str, _Wanted], list[str]]:
        wanted: dict[str, _Wanted] = {}
        notes = []
        for name in self._names:
            owner = _owner(name, live)
            if owner is None:
                notes.append(f"cannot put back {name}: there is no such object now")
                continue
            try:
                value, data = read_value(self._directory / values_key(self._step, name))
            except FileNotFoundError:
                notes.append(f"cannot put back {name}: it has no value at step {self._step}")
                continue
            into = wanted.setdefault(owner, _Wanted({}, {}))
            into.states[name] = value.state
            for tensor in value.tensors:
                into.tensors[tensor.path] = HostTensor(tensor.dtype, tensor.shape, data[tensor.path])
        return wanted, notes


def _owner(name: str, live: Mapping[str, Taken]) -> str | None:
    """Return the object that the component `name` is of."""
    place = name
    while place not in live and "/" in place:
        place = place.rpartition("/")[0]
    return place if place in live else None


def _decoded(live: Taken, wanted: _Wanted) -> Any:
    def tensor(path: str) -> HostTensor:
        return wanted.tensors[path] if path in wanted.tensors else _copy(live.sources[path])

    state = replaced(live.name, live.state, wanted.states)
    return Decoder(tensor, families.codecs()).decode(state)


def _copy(source: TensorSource) -> HostTensor:
    return HostTensor(source.dtype, source.shape, memoryview(copy_bytes(source)))
