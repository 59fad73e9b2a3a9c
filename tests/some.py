"""Some of many combinations in the ordinary tests, all of them in the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def some(*axes: dict[str, Any], one_in: int) -> list[Any]:
    """Return all combinations of the values of `axes`, by name; but for one in `one_in` they are chaos.

    Every value of every axis is still among these, as long as the longest other axis has at least `one_in`
    values. Of a single axis it is each `one_in`-th. In the folders that `conftest.py` names, of what is
    left again every third is an ordinary test.
    """
    found = []
    for places in product(*(range(len(axis)) for axis in axes)):
        chosen = [list(axis.items())[place] for axis, place in zip(axes, places, strict=True)]
        marks = [] if sum(places) % one_in == 0 else [pytest.mark.chaos]
        values = [value for _, value in chosen]
        found.append(pytest.param(*values, id="-".join(name for name, _ in chosen), marks=marks))
    return found


def named(values: Iterable[Any]) -> dict[str, Any]:
    """Return an axis whose values are called as they print."""
    return {str(value): value for value in values}
