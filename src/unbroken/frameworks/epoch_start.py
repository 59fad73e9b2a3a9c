"""The random states with which an epoch begins, taken and put back together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng

Marks = dict[str, Any]


def snapshot(held: HeldGenerators) -> Marks:
    """Return the states of the shared generators and of those that are held."""
    return {"global": capture_global_rng(), "generators": held.capture()}


def apply(held: HeldGenerators, taken: Marks) -> None:
    """Put all generators where they were."""
    # A device that was not in use yet when the epoch began keeps the state it has.
    restore_present_rng({**capture_global_rng(), **taken["global"]})
    held.restore(taken["generators"])


def applying(held: HeldGenerators, taken: Marks) -> Callable[[], None]:
    """Return a function that does it later."""
    # No reference to the loader: a cycle would keep workers alive until a collection.
    return lambda: apply(held, taken)


def marked(held: HeldGenerators) -> Callable[[], None]:
    """Return a function that puts all generators where they are now."""
    return applying(held, snapshot(held))


def marking_first_draw(held: HeldGenerators, marks: Marks) -> Callable[[], None]:
    """Return a function that adds to `marks` where the generators are before the order is drawn."""
    return lambda: marks.update(first_draw=snapshot(held))
