"""The map of names that a user gives, `old name -> new name`, and the function that it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

Rename: TypeAlias = Callable[[str], str]


def renaming(rename: Mapping[Any, str], *, boundaries: str = ".") -> Rename:
    """Return the function that maps a name such as `model.layer.weight`.

    A rule is a name, or the first segments of one, of which the longest that fits counts; where none
    does, compiled regular expressions are tried in their order. `boundaries` are the characters between
    segments. What becomes nothing takes the boundary behind it along.

    >>> renaming({"model": "net", "model.body": ""})("model.body.weight")
    'weight'
    """
    expressions = [(old, new) for old, new in rename.items() if isinstance(old, re.Pattern)]
    segments = {
        str(old).rstrip(boundaries): new.rstrip(boundaries)
        for old, new in rename.items()
        if isinstance(old, str)
    }
    find = _first_segments(segments, boundaries)

    def new_name(name: str) -> str:
        old = find(name)
        if old is not None:
            new, rest = segments[old], name[len(old) :]
            return new + rest if new else rest[1:]
        changed = (found for old, new in expressions if (found := old.sub(new, name)) != name)
        return next(changed, name)

    return new_name


def idle_segments(rename: Mapping[str, str], names: Iterable[str], *, boundaries: str = ".") -> list[str]:
    """Return the rules that are the first segments of none of `names`, nor one of them."""
    left = {old.rstrip(boundaries): old for old in rename}
    find = _first_segments(left, boundaries)
    for name in names:
        # With a longer rule that fits, a shorter one is no slip of the pen either.
        while (found := find(name)) is not None:
            del left[found]
    return list(left.values())


def _first_segments(known: Collection[str], boundaries: str) -> Callable[[str], str | None]:
    """Return the function that finds the longest of `known`, as they are then, that a name begins with."""
    lengths = sorted(set(map(len, known)), reverse=True)

    def find(name: str) -> str | None:
        # Behind the end of a name there is nothing, which is a boundary like any other.
        fitting = (name[:size] for size in lengths if name[size : size + 1] in boundaries)
        return next((first for first in fitting if first in known), None)

    return find
