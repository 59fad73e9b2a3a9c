"""The losses after a resume beside those before the stop. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def losses_before(health: Any, step: int, count: int, *, loss: str) -> list[float]:
    """Return the last `count` finite losses up to `step` that a manifest's state of the watch holds.

    There are none if another metric than `loss` was the loss then.
    """
    is_of_it = isinstance(health, Mapping) and health.get("loss") == loss
    kept = health.get("losses") if is_of_it else None
    found = [pair for pair in kept or () if isinstance(pair, Sequence) and len(pair) == 2]
    losses = [value for at, value in found if _is_number(value) and _is_number(at) and at <= step]
    return losses[len(losses) - count :] if len(losses) > count else losses


def limit(before: Sequence[float], factor: float) -> float:
    """Return what the mean of losses may be after a resume: `factor` times that of those before.

    Below zero, "half as much again" is that much upwards; and where the mean is smaller than the range
    of the losses, it is near zero by chance alone, and the range counts instead.

    >>> limit([2.0, 2.0], 1.5), limit([-2.0, -2.0], 1.5), limit([-1.0, 1.0], 1.5)
    (3.0, -1.0, 1.0)
    """
    middle = mean(before)
    return middle + (factor - 1) * max(abs(middle), max(before) - min(before))


def is_too_high(after: Sequence[float], before: Sequence[float], factor: float) -> bool:
    """Tell whether losses after a resume are too high; so is what is not a number."""
    found = mean(after)
    return not found <= limit(before, factor)


def mean(losses: Sequence[float]) -> float:
    """Return the mean; NaN and infinity among the losses make it NaN or infinite."""
    return sum(losses) / len(losses)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
