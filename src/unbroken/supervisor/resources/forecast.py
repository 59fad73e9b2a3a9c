"""What is to be expected if things go on as they do: pure arithmetic on samples of the past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

# Seconds on a clock that never goes back, and a value.
Sample: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far training was at a moment: steps done, and seconds it had waited for batches in all."""

    seconds: float
    step: int
    waited_seconds: float


class Trend:
    """How a value goes on, by its samples of the last `span_seconds`, `points` of them at most.

    Nothing is said before they span `min_seconds`.
    """

    def __init__(self, *, span_seconds: float, min_seconds: float, points: int = 60) -> None:
        self._span_seconds = span_seconds
        self._min_seconds = min_seconds
        self._every_seconds = span_seconds / points
        self._samples: list[Sample] = []
        self.growth: float | None = None

    def add(self, seconds: float, value: float) -> None:
        """Take a sample, unless the last one was a moment ago, and see to `growth`, a second."""
        if self._samples and seconds - self._samples[-1][0] < self._every_seconds:
            return
        oldest = seconds - self._span_seconds
        self._samples = [sample for sample in self._samples if sample[0] > oldest]
        self._samples.append((seconds, value))
        self.growth = steady_growth(self._samples, min_seconds=self._min_seconds)


def slope(samples: Sequence[Sample]) -> float | None:
    """Return by how much the value grows a second, or None if there is nothing to tell it from.

    It is the median over all pairs of samples, which a few wild ones do not move.

    >>> slope([(0, 10), (1, 12), (2, 99), (3, 16), (4, 18)])
    2.0
    """
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(samples, 2)
        if later[0] > earlier[0]
    )
    if not slopes:
        return None
    # By hand: the module `statistics` is larger than all of this.
    half = len(slopes) // 2
    return (slopes[half] + slopes[~half]) / 2


def steady_growth(samples: Sequence[Sample], *, min_seconds: float) -> float | None:
    """Return by how much the value keeps growing a second: 0.0 if it has come to rest or falls.

    None while there are samples of less than `min_seconds`. What grew at first and no longer does, as
    memory while a program starts, is at rest.
    """
    if len(samples) < 4 or samples[-1][0] - samples[0][0] < min_seconds:
        return None
    over_all, of_late = slope(samples), slope(samples[len(samples) // 2 :])
    if over_all is None or of_late is None:
        return None
    return max(0.0, min(over_all, of_late))


def seconds_until_used_up(left: float | None, growth: float | None) -> float | None:
    """Return after how many seconds `left` is used up at `growth` a second; None if never, or unknown."""
    if left is None or not growth or growth < 0:
        return None
    return max(0.0, left) / growth


def recent(paces: Sequence[Pace], *, min_seconds: float, min_steps: int) -> Sequence[Pace]:
    """Return the shortest end of `paces` that spans `min_seconds` and `min_steps`, or all of them.

    A rate over less would jump about: of slow steps there may be none for a while.
    """
    for start in range(len(paces) - 1, -1, -1):
        seconds = paces[-1].seconds - paces[start].seconds
        if seconds >= min_seconds and paces[-1].step - paces[start].step >= min_steps:
            return paces[start:]
    return paces


def steps_per_second(paces: Sequence[Pace]) -> float | None:
    """Return the rate from the first to the last of `paces`, or None if no time lies between."""
    if len(paces) < 2 or paces[-1].seconds <= paces[0].seconds:
        return None
    return max(0, paces[-1].step - paces[0].step) / (paces[-1].seconds - paces[0].seconds)


def data_wait_share(paces: Sequence[Pace]) -> float | None:
    """Return the share of the time that training spent waiting for batches, from 0 to 1.

    None if it made no step in that time, as it then does something else, or nobody counts the waiting.
    """
    if len(paces) < 2 or paces[-1].seconds <= paces[0].seconds or paces[-1].step <= paces[0].step:
        return None
    if not paces[-1].waited_seconds:
        return None
    waited = paces[-1].waited_seconds - paces[0].waited_seconds
    return min(1.0, max(0.0, waited / (paces[-1].seconds - paces[0].seconds)))


def seconds_to_go(step: int, goal_step: int, steps_per_second: float | None) -> float | None:
    """Return how long the steps up to `goal_step` take, or None if that, or the goal (0), is unknown."""
    if goal_step <= 0 or not steps_per_second:
        return None
    return max(0, goal_step - step) / steps_per_second
