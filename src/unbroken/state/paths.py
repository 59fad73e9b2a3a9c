"""Paths of tensors in a state: the name of the part, then the keys that lead there, joined by slashes."""

from __future__ import annotations


def part_of(path: str) -> str:
    """Return the name of the part that the tensor at `path` belongs to.

    >>> part_of("model/0.weight")
    'model'
    """
    return path.partition("/")[0]


def name_of(path: str) -> str:
    """Return the name of the tensor at `path`, as people write it in patterns.

    >>> name_of("model/0.weight")
    'model.0.weight'
    """
    return path.replace("/", ".", 1)
