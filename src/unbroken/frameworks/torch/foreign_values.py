"""Plain values of a file in the form that live ones have: tuples are lists there, and every key is a text."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch

from unbroken.state.handlers import Difference
from unbroken.state.tensors import TensorSource

# What schedulers of older releases kept, and no release reads any more.
_RETIRED = frozenset({"verbose"})
# How often a milestone may be named: each is one element of a list at times.
_MOST_COUNTED = 1000


class UnlikeError(Exception):
    """A value in the file is of another kind than the live one; `where` it stands, and `text` how."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(where, text)
        self.where = where
        self.text = text


def like(live: Any, saved: Any, where: str) -> Any:
    """Return `saved`, as a file has it, in the kind of `live`; raise UnlikeError if it is of none like it.

    Where there is nothing here to compare with, it stays as it is.
    """
    if live is None or _is_alike(live, saved):
        return saved
    if isinstance(live, tuple | list | set | frozenset | deque) and isinstance(saved, list):
        return _sequence(live, saved, where)
    if isinstance(live, Mapping) and isinstance(saved, dict):
        return _mapping(live, saved, where)
    raise UnlikeError(where, f"{_named(live)} here, the checkpoint has {_named(saved)}")


def _is_alike(live: Any, saved: Any) -> bool:
    """Tell whether both are numbers or texts; a tensor may stand for a number, and the other way round."""
    if isinstance(live, str):
        return isinstance(saved, str)
    is_tensor = isinstance(live, torch.Tensor)
    if isinstance(saved, TensorSource):
        elements = live.numel() if is_tensor else 1
        is_number = is_tensor or (_is_number(live) and not isinstance(live, bool))
        return is_number and math.prod(saved.shape) == elements and not saved.dtype.startswith("C")
    return _is_number(saved) and (_is_number(live) or (is_tensor and live.numel() == 1))


def state_like(live: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[Difference]]:
    """Return a state as a file has it in the kind of `live`, without what `live` lacks, and what differs.

    One that has something of another kind is not looked at further: `live` itself is returned for it.

    What begins with an underscore may be on one side only: it comes and goes with releases.
    """
    differences: list[Difference] = []
    state = _keyed(live, saved, "", differences)
    try:
        return like(dict(live), state, ""), differences
    except UnlikeError as error:
        return dict(live), [*differences, Difference("other", error.where, error.text)]


def _keyed(
    live: Mapping[str, Any], saved: Mapping[str, Any], where: str, differences: list[Difference]
) -> dict[str, Any]:
    """Return `saved` without the public keys that `live` lacks, and add these and those that it lacks."""
    place = f"{where}." if where else ""
    mine, theirs = _public(live), _public(saved) - _RETIRED
    differences += [
        Difference("missing", f"{place}{key}", "the checkpoint lacks it")
        for key in live
        if key in mine - theirs
    ]
    differences += [
        Difference("unexpected", f"{place}{key}", "there is no such thing here: it may be of another class")
        for key in saved
        if key in theirs - mine
    ]
    kept = {key: item for key, item in saved.items() if key in mine or key.startswith("_")}
    inner, others = live.get("_schedulers"), saved.get("_schedulers")
    if isinstance(inner, list) and isinstance(others, list) and len(inner) == len(others):
        kept["_schedulers"] = [
            _keyed(one, other, f"{place}schedulers {index}", differences)
            if isinstance(other, dict)
            else other
            for index, (one, other) in enumerate(zip(inner, others, strict=True))
        ]
    return kept


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if not key.startswith("_")}


def _sequence(live: Any, saved: list[Any], where: str) -> Any:
    ordered = live if isinstance(live, tuple | list) else ()
    if isinstance(live, tuple) and len(live) != len(saved):
        raise UnlikeError(where, f"{len(live)} values here, the checkpoint has {len(saved)}")
    # What there is more of is like the last one.
    items = [
        like(ordered[min(index, len(ordered) - 1)] if ordered else None, item, _at(where, index))
        for index, item in enumerate(saved)
    ]
    if isinstance(live, list | deque):
        return items if isinstance(live, list) else deque(items, live.maxlen)
    kind = next(kind for kind in (tuple, frozenset, set) if isinstance(live, kind))
    try:
        return kind(items)
    except TypeError:
        # Nothing that a set may hold: lists, or tensors by their places.
        raise UnlikeError(where, f"a {kind.__name__} here, the checkpoint has {_named(saved)}") from None


def _mapping(live: Mapping[Any, Any], saved: dict[str, Any], where: str) -> Any:
    named = {str(key): key for key in live}
    absent = sorted(_public(named) - saved.keys())
    if where and absent and not isinstance(live, Counter):
        raise UnlikeError(_at(where, absent[0]), "the checkpoint lacks it")
    numbered = isinstance(live, Counter) or (bool(live) and all(type(key) is int for key in live))
    found: dict[Any, Any] = {}
    for name, item in saved.items():
        key = named.get(name, int(name) if numbered and _is_integer(name) else name)
        found[key] = like(live.get(key), item, _at(where, name))
        if isinstance(live, Counter) and not (isinstance(item, int) and 0 <= item <= _MOST_COUNTED):
            raise UnlikeError(_at(where, name), f"expected a small count, the checkpoint has {_named(item)}")
    # With its kind, which a read-back compares.
    kinds: Mapping[type, Any] = {Counter: Counter, OrderedDict: OrderedDict}
    return kinds.get(type(live), dict)(found)


def _is_integer(name: str) -> bool:
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _named(value: object) -> str:
    if isinstance(value, TensorSource):
        return "a tensor"
    return (
        repr(value)
        if isinstance(value, int | float | str) and len(repr(value)) < 40
        else type(value).__name__
    )
