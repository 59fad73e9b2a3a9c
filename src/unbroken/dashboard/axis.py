"""Where values lie along a side of a picture, and the round ones that are written there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_FARTHEST = 1e307
_NEAREST = 1e-307


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values from `low` to `high` to shares from 0 to 1; those outside lie outside.

    Ticks are at least `least_tick` apart, where the axis is not logarithmic.
    """

    low: float
    high: float
    is_logarithmic: bool = False
    least_tick: float = 0.0

    def share(self, value: float) -> float:
        """Return where `value` lies."""
        if self.is_logarithmic:
            # What is not above zero lies below the picture.
            log = math.log(value) if value > 0 else math.log(self.low) - 1
            return (log - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the axis, at most about `most`."""
        if self.is_logarithmic:
            return _decades(self.low, self.high, most)
        rough = max((self.high - self.low) / most, self.least_tick)
        power = 10.0 ** math.floor(math.log10(rough))
        width = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), power * 10)
        first, last = math.ceil(self.low / width), math.floor(self.high / width)
        return [float(f"{index * width:.12g}") for index in range(first, last + 1)]


def value_axis(values: Iterable[float]) -> Axis | None:
    """Return an axis for finite `values` with a little air, or None if there are none.

    It is logarithmic if they are positive and span more than a factor of 20.
    """
    found = list(values)
    if not found:
        return None
    low, high = min(found), max(found)
    if 0 < low < high / 20:
        return Axis(low=max(low / 1.2, _NEAREST), high=min(high * 1.2, _FARTHEST), is_logarithmic=True)
    air = min(high - low, _FARTHEST) * 0.06
    # An axis that is narrower than that has no ticks that could be told apart.
    air = max(air, 1e-9 * max(abs(low), abs(high))) if air > 0 else abs(high) * 0.1 or 1.0
    # The length of the axis must be a number, too: what lies beyond is out of the picture.
    low, high = max(low - air, -_FARTHEST), min(high + air, _FARTHEST)
    return Axis(low=low, high=high) if low < high else Axis(low=-_FARTHEST, high=_FARTHEST)


def step_axis(last_step: int) -> Axis:
    """Return the axis of steps, from the beginning."""
    return Axis(low=0.0, high=float(max(last_step, 1)), least_tick=1.0)


def labels(ticks: Sequence[float]) -> list[str]:
    """Return what is written at `ticks`: as many digits as tell them apart.

    >>> labels([0.0, 0.5, 1.0]), labels([0.99991, 0.99992]), labels([12345.0, 12346.0])
    (['0', '0.5', '1'], ['0.99991', '0.99992'], ['12345', '12346'])
    """
    width = min((later - tick for tick, later in pairwise(ticks)), default=math.inf)
    for digits in range(4, 12):
        found = [f"{tick:.{digits}g}" for tick in ticks]
        if all(abs(float(text) - tick) <= width / 100 for text, tick in zip(found, ticks, strict=True)):
            return found
    return [f"{tick:.12g}" for tick in ticks]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) <= most:
            return found
    every = math.ceil(len(found) / most)
    return found[::every]
