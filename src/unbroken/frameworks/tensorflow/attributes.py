"""Plain attributes of objects of TensorFlow: one that changes while training runs is state.

Its own checkpoints drop numbers, texts, lists and arrays that a module has beside its variables, without a
word. Nothing on them tells a counter from a setting but that it moves. So what is there is noted when it is
first seen; what differs later is kept from then on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from unbroken.frameworks.tensorflow.closed import is_closed
from unbroken.frameworks.tensorflow.content import Content, Trackable, held_by
from unbroken.frameworks.tensorflow.tensors import is_eager
from unbroken.state.handlers import Difference

# Larger ones are data rather than counters, and would have to be compared item by item at each save.
_MOST_ITEMS = 100
_DEEPEST = 5
# Larger arrays are told apart by who they are, not by what is in them: reading them would cost a save's time.
_MOST_BYTES = 1 << 24
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SETS = (set, frozenset)
_CONTAINERS = (list, tuple, deque, dict, *_SETS)
# Among the values of an owner: the labels of what it had and has no more. No attribute can be called so.
_REMOVED = "(removed)"

Saved: TypeAlias = Mapping[str, Mapping[Any, Any]]


@dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """Equal to another sight of the very same object, which stays there as long as this."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class _Baseline:
    """What the plain attributes of one owner looked like; which have been found to change, or are gone."""

    owner: object
    sights: dict[Any, object]
    counters: set[Any] = field(default_factory=set)
    removed: set[Any] = field(default_factory=set)


class Attributes:
    """The plain attributes of objects that have changed since these objects were first seen."""

    def __init__(self) -> None:
        self._baselines: dict[int, _Baseline] = {}

    def state(self, content: Content) -> dict[str, dict[Any, Any]]:
        """Return `owner -> attribute -> value` for what changes."""
        found = {}
        for path, owner in content.owners.items():
            baseline = self._baseline(owner)
            values: dict[Any, Any] = {label: _plain(item) for label, item in self._changed(baseline)}
            if baseline.removed:
                values[_REMOVED] = sorted(baseline.removed, key=repr)
            if values:
                found[path] = values
        return found

    def restore(self, content: Content, saved: Saved) -> None:
        """Set the attributes of `saved`; the others are settings of the script as they are now."""
        for path, owner in content.owners.items():
            values = dict(saved.get(path, {}))
            removed = values.pop(_REMOVED, ())
            for label, value in values.items():
                _put(owner, label, value)
            for label in reversed(removed):
                _remove(owner, label)
            self._baselines[id(owner)] = _Baseline(owner, dict(_sights(owner)), set(values), set(removed))

    def differences(self, content: Content, saved: Saved) -> list[Difference]:
        """Return what in `saved` has no place here."""
        return [
            Difference("unexpected", f"{path}.{label}", "the object that it belongs to is not there")
            for path, values in saved.items()
            if path not in content.owners
            for label in values
            if label != _REMOVED
        ]

    def unkept(self, content: Content) -> Iterator[tuple[str, str]]:
        """Yield `(name, what it is)` for what has changed and is too large to be looked at."""
        for path, owner in content.owners.items():
            before = self._baseline(owner).sights
            for label, item in _items(owner):
                now = _size(item)
                if now is not None and before.get(label) != now:
                    name = f"{path}.{label}" if path else label
                    yield name, f"a {type(_unwrapped(item)).__name__} of {len(item)} items"

    def _baseline(self, owner: object) -> _Baseline:
        known = self._baselines.get(id(owner))
        if known is None or known.owner is not owner:
            known = self._baselines[id(owner)] = _Baseline(owner, dict(_sights(owner)))
        return known

    def _changed(self, baseline: _Baseline) -> Iterator[tuple[Any, Any]]:
        now = dict(_sights(baseline.owner))
        here = _labels(baseline.owner)
        baseline.removed = {label for label in {*baseline.sights, *baseline.removed} if label not in here}
        baseline.counters |= {
            label
            for label, sight in now.items()
            if label not in baseline.sights or baseline.sights[label] != sight
        }
        for label, item in _items(baseline.owner):
            if label in baseline.counters and _sight(item) is not None:
                yield label, item


def _items(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what `owner` holds, that of a dictionary by the very keys: 3 and "3" are two."""
    if isinstance(owner, Mapping):
        yield from sorted(((_plain_key(key), item) for key, item in owner.items()), key=_text)
    else:
        yield from held_by(owner)


def _labels(owner: Any) -> set[Any]:
    # What has become an object of Keras is not among the items any more, and there nevertheless.
    return {label for label, _ in _items(owner)} | (set(vars(owner)) if is_closed(owner) else set())


def _plain_key(key: Any) -> Any:
    if isinstance(key, np.generic):
        return key.item()
    return key if isinstance(key, _SCALARS) else str(key)


def _text(item: tuple[Any, Any]) -> str:
    return repr(item[0])


def _sights(owner: Any) -> Iterator[tuple[Any, object]]:
    for label, item in _items(owner):
        sight = _sight(item)
        if sight is None:
            sight = _size(item)
        if sight is not None:
            yield label, sight


def _sight(value: Any, depth: int = _DEEPEST) -> object:
    """Return what tells a plain value from another one, None for what is not plain."""
    value = _unwrapped(value)
    if isinstance(value, (*_SCALARS, np.generic)):
        return (type(value), repr(value))
    if is_eager(value):
        return _Same(value)
    if isinstance(value, np.ndarray):
        return _sight_of_array(value)
    if not isinstance(value, _CONTAINERS) or not depth or len(value) > _MOST_ITEMS:
        return None
    if isinstance(value, dict) and not all(isinstance(key, _SCALARS) for key in value):
        return None
    items = (
        value.values()
        if isinstance(value, dict)
        else sorted(value, key=repr)
        if isinstance(value, _SETS)
        else value
    )
    sights = [_sight(item, depth - 1) for item in items]
    if any(sight is None for sight in sights):
        return None
    return (type(value), [*map(repr, value)] if isinstance(value, dict) else None, sights)


def _sight_of_array(array: np.ndarray[Any, Any]) -> object:
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        return None
    if array.nbytes > _MOST_BYTES:
        return _Same(array)
    return (array.dtype.str, array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest())


def _size(value: Any) -> object:
    """Return what tells a container that is too large to be looked at from what it becomes when it grows."""
    value = _unwrapped(value)
    is_large = isinstance(value, list | deque | dict | set) and len(value) > _MOST_ITEMS
    return ("items", len(value)) if is_large else None


def _plain(value: Any) -> Any:
    """Return `value` without the wrappers in which TensorFlow tracks what is put into containers."""
    value = _unwrapped(value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list) and isinstance(value, Trackable):
        return list(value)
    if isinstance(value, list | dict | set) and is_closed(value):
        return next(kind(value) for kind in (list, dict, set) if isinstance(value, kind))
    # Those of dictionaries and tuples stand in front of the one that the user has made.
    return getattr(value, "__wrapped__", value) if isinstance(value, dict | tuple) else value


def _remove(owner: Any, label: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(label, None)
    elif isinstance(owner, list | deque):
        if int(label) < len(owner):
            del owner[int(label)]
    elif hasattr(owner, label):
        delattr(owner, label)


def _put(owner: Any, label: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[next((key for key in owner if _plain_key(key) == label), label)] = value
    elif isinstance(owner, list | deque):
        if int(label) < len(owner):
            owner[int(label)] = value
        else:
            owner.append(value)
    elif not isinstance(owner, tuple):
        setattr(owner, label, value)
