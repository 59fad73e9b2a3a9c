"""The components of a state: each tensor and each plain value by its name, as people know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from unbroken.checkpoint.digest import ALGORITHM, hasher
from unbroken.rundir.rehearsal import StoredTensor, StoredValue
from unbroken.state.tensors import TensorSource, bytes_of, size_bytes
from unbroken.state.tree import Json, join

# The name under which the order of the keys of a dictionary stands.
ORDER_OF_KEYS = "(order of keys)"


@dataclass(frozen=True, slots=True)
class Component:
    """A named piece of a state: JSON, and the tensors in it."""

    name: str
    state: Json
    sources: Mapping[str, TensorSource] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes(source.dtype, source.shape) for source in self.sources.values())

    def stored(self) -> StoredValue:
        """Return what is written of it, but for the bytes."""
        tensors = tuple(
            StoredTensor(path, source.dtype, source.shape, size_bytes(source.dtype, source.shape))
            for path, source in self.sources.items()
        )
        return StoredValue(self.state, tensors)


def components(
    name: str,
    state: Json,
    sources: Mapping[str, TensorSource],
    *,
    wholes: Sequence[str] = (),
    ordered: bool = False,
) -> list[Component]:
    """Take an encoded state apart: dictionaries with names as keys, down to what is a value of its own.

    `wholes` are the levels that stay together, as the state of one generator: "" is the state itself,
    "*" is each of its items, "held/*" each below `held`. With `ordered` the order of keys counts, too.
    """
    leaves = dict(_leaves(name, state, "", wholes, ordered))
    owned: dict[str, dict[str, TensorSource]] = {leaf: {} for leaf in leaves}
    for path, source in sources.items():
        place = path
        while place not in owned and "/" in place:
            place = place.rpartition("/")[0]
        if place in owned:
            owned[place][path] = source
    return [Component(leaf, item, owned[leaf]) for leaf, item in leaves.items()]


def replaced(name: str, state: Json, values: Mapping[str, Json]) -> Json:
    """Return `state` with the components in `values` put in their places; new ones are added."""
    if name in values:
        return values[name]
    order = values.get(join(name, ORDER_OF_KEYS))
    below = _below(name, values)
    if not below or not isinstance(state, dict) or not is_dictionary(state):
        return state
    items: dict[str, Json] = {key: replaced(join(name, key), item, values) for key, item in state.items()}
    for key in below:
        if key not in items and key != ORDER_OF_KEYS:
            items[key] = replaced(join(name, key), {}, values)
    if isinstance(order, list):
        first = {str(key): items[str(key)] for key in order if key in items}
        items = {**first, **{key: item for key, item in items.items() if key not in first}}
    return items


def is_dictionary(state: Json) -> bool:
    """Tell whether an encoded value is a dictionary with names as keys, rather than a tagged value."""
    return isinstance(state, dict) and not any(key.startswith("$") for key in state)


def digests(found: Iterable[Component]) -> dict[str, str]:
    """Return the digests of components by name, of live memory: nothing may change it meanwhile."""
    return {component.name: _digest(component) for component in found}


def _below(name: str, values: Mapping[str, Json]) -> list[str]:
    """Return the keys below `name` that lead to one of `values`."""
    start = name + "/"
    keys = {path[len(start) :].partition("/")[0]: None for path in values if path.startswith(start)}
    return [key.replace("%2F", "/").replace("%25", "%") for key in keys]


def _leaves(
    name: str, state: Json, below: str, wholes: Sequence[str], ordered: bool
) -> Iterator[tuple[str, Json]]:
    if not isinstance(state, dict) or not is_dictionary(state) or not state or _is_whole(below, wholes):
        yield name, state
        return
    if ordered and len(state) > 1:
        yield join(name, ORDER_OF_KEYS), list(state)
    for key, item in state.items():
        yield from _leaves(join(name, key), item, join(below, key).removeprefix("/"), wholes, ordered)


def _is_whole(below: str, wholes: Sequence[str]) -> bool:
    first, slash, rest = below.partition("/")
    for pattern in wholes:
        if pattern == below or (pattern == "*" and below and not slash and first + "/*" not in wholes):
            return True
        if slash and "/" not in rest and pattern == first + "/*":
            return True
    return False


def _digest(component: Component) -> str:
    found = hasher(ALGORITHM)
    found.update(msgspec.json.encode(component.state))
    for source in component.sources.values():
        found.update(f"{source.dtype}{source.shape}".encode())
        found.update(bytes_of(source))
    return found.hexdigest()
