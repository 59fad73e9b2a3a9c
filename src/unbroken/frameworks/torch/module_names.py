"""Other names for what stands in the saved state of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unbroken.checkpoint.weights import ATTRIBUTES, FLAGS, SPECIAL
from unbroken.errors import UsageError
from unbroken.state.handlers import GRADIENTS, Renamed
from unbroken.state.tree import Json, join

_LISTS_OF_PARAMETERS = ("frozen", "graded")


def dotted(module: str, name: str) -> str:
    """Return the full name of what is called `name` on a module."""
    return f"{module}.{name}" if module and name else module or name


def renamed(part: str, state: Mapping[str, Any], rename: Callable[[str], str]) -> Renamed:
    """Return the encoded state of a module with every name below `part` renamed, and its paths.

    References to tensors stay as they are.

    Raises UsageError if two names become one, or if one leaves the part.
    """
    names = _Names(part, rename)
    new = names.all_of(name for name in state if name not in SPECIAL)
    gradients = state.get(GRADIENTS, {})
    paths = {join(part, old): join(part, name) for old, name in new.items()}
    below = join(part, GRADIENTS)
    paths |= {join(below, name): join(below, names.of(name)) for name in gradients}
    for old in new:
        paths |= {path: _moved(path, paths) for path in _paths(state[old], join(part, old))}
    for old, item in gradients.items():
        paths |= {path: _moved(path, paths) for path in _paths(item, join(below, old))}
    result: dict[str, Any] = {name: state[old] for old, name in new.items()}
    if FLAGS in state:
        result[FLAGS] = _flags(state[FLAGS], names)
    if ATTRIBUTES in state:
        result[ATTRIBUTES] = _attributes(state[ATTRIBUTES], names)
    if GRADIENTS in state:
        result[GRADIENTS] = {names.of(old): item for old, item in gradients.items()}
    return Renamed(result, paths)


class _Names:
    """What names below a part become."""

    def __init__(self, part: str, rename: Callable[[str], str]) -> None:
        self._part = part
        self._rename = rename

    def of(self, name: str) -> str:
        """Return the new name of a parameter or buffer."""
        return self._below(self._rename(dotted(self._part, name)))

    def of_module(self, name: str) -> str:
        full = dotted(self._part, name)
        new = self._rename(full)
        if new == full:
            # A pattern may want the dot after the name, as all names of parameters have it.
            new = self._rename(f"{full}.").removesuffix(".")
        return self._below(new)

    def all_of(self, names: Iterable[str]) -> dict[str, str]:
        new = {name: self.of(name) for name in names}
        taken: dict[str, str] = {}
        for old, name in new.items():
            if name in taken:
                raise _collision(*(dotted(self._part, one) for one in (taken[name], old, name)))
            taken[name] = old
        return new

    def _below(self, full: str) -> str:
        if full != self._part and not full.startswith(f"{self._part}."):
            raise UsageError(
                f"rename: expected names of part {self._part!r} to stay in it, found that one becomes {full}",
                hint="rename inside of a part, or the whole part",
            )
        return full[len(self._part) + 1 :]


def _flags(flags: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    new: dict[str, Any] = dict(flags)
    for key in _LISTS_OF_PARAMETERS:
        if key in flags:
            new[key] = sorted(names.of(name) for name in flags[key])
    if "overlapping" in flags:
        groups = (sorted(names.of(name) for name in group) for group in flags["overlapping"])
        new["overlapping"] = sorted(groups)
    if "graded_sparse" in flags:
        new["graded_sparse"] = {names.of(name): item for name, item in flags["graded_sparse"].items()}
    new["evaluating"] = sorted({names.of_module(name) for name in flags["evaluating"]})
    return new


def _attributes(attributes: Mapping[str, Mapping[str, Any]], names: _Names) -> dict[str, dict[str, Any]]:
    new: dict[str, dict[str, Any]] = {}
    for module, items in attributes.items():
        name = names.of_module(module)
        for attribute in new.get(name, {}).keys() & items.keys():
            raise _collision(
                f"{attribute} of another module", f"{module}.{attribute}", dotted(name, attribute)
            )
        new[name] = {**new.get(name, {}), **items}
    return new


def _moved(path: str, paths: Mapping[str, str]) -> str:
    """Return the new path of a tensor at or below one of `paths`."""
    prefix, rest = path, ""
    while prefix not in paths:
        prefix, slash, segment = prefix.rpartition("/")
        if not slash:
            return path
        rest = f"/{segment}{rest}"
    return paths[prefix] + rest


def _paths(encoded: Json, path: str) -> Iterator[str]:
    """Yield the paths of all tensors below `path`, those they are kept under and their own."""
    if isinstance(encoded, list):
        for index, item in enumerate(encoded):
            yield from _paths(item, f"{path}/{index}")
    elif isinstance(encoded, dict) and "$tensor" in encoded:
        yield from (path, str(encoded["$tensor"]))
    elif isinstance(encoded, dict):
        for key, item in encoded.items():
            yield from _paths(item, path if key.startswith("$") else join(path, key))


def _collision(one: str, other: str, name: str) -> UsageError:
    return UsageError(
        f"rename: {one} and {other} would both be called {name}",
        hint="make the pattern narrower, or name each by itself",
    )
