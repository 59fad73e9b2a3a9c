"""save="auto": how long to wait between two saves, from what they cost and how often the run fails.

J. W. Young, "A first order approximation to the optimum checkpoint interval" (Communications of the ACM,
1974), balances the time that saves take against the time that a failure loses; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (Future Generation Computer Systems, 2006),
adds the terms that matter where failures are frequent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from unbroken.rundir.save_interval import Limit, SaveInterval
from unbroken.training.failures import Failures
from unbroken.training.save_policy import Progress

# Before the run has shown how often it fails, that counts as this: one failure in a day.
_ASSUMED_FAILURES = 1
_ASSUMED_SECONDS = 24 * 3600.0
# Before a save was measured. It gives seven minutes between two.
_ASSUMED_COST_SECONDS = 1.0
# Below this, what a save costs beside the wait (writing, digests, pruning) is no longer small.
_SHORTEST_SECONDS = 30.0
# So much training is lost at most: from the moment that a state is of to the one when the next is durable.
_MOST_LOST_SECONDS = 30 * 60.0
# A smaller change is not worth a word.
_CHANGE = 1.25
_FEW_SAVES = 8
_FEW_STEPS = 64
_LEAST_STEPS = 3


def best_interval(*, cost_seconds: float, failure_seconds: float) -> float:
    """Return how long to train between two saves, if there is one failure in `failure_seconds` on average.

    By Daly's formula; its first term is Young's, the square root of twice the product of both.
    """
    if cost_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = cost_seconds / (2 * failure_seconds)
    young = math.sqrt(2 * cost_seconds * failure_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def save_interval(
    *, cost_seconds: float | None, durable_seconds: float, failures: int, lived_seconds: float
) -> SaveInterval:
    """Return the interval for what was measured, within its limits.

    Two saves are at least 30 seconds apart, twice as long as one takes until it is durable, and as long as
    it stops training: at most half of the time goes to saving. And a failure loses at most 30 minutes, but
    where saves take so long that both cannot be.
    """
    cost = _ASSUMED_COST_SECONDS if cost_seconds is None else cost_seconds
    failure_seconds = (lived_seconds + _ASSUMED_SECONDS) / (failures + _ASSUMED_FAILURES)
    best = best_interval(cost_seconds=cost, failure_seconds=failure_seconds)
    floor = max(_SHORTEST_SECONDS, 2 * durable_seconds, cost)
    seconds = max(floor, min(best, _MOST_LOST_SECONDS - durable_seconds))
    limit: Limit = "" if seconds == best else "floor" if seconds == floor else "ceiling"
    return SaveInterval(
        seconds=seconds,
        cost_seconds=cost_seconds,
        durable_seconds=durable_seconds,
        failures=failures,
        lived_seconds=lived_seconds,
        limit=limit,
    )


@dataclass(slots=True)
class SaveCosts:
    """What saves cost training, as it is measured: the wait, and steps that take longer while one is written.

    Of the last few saves the median counts: a single one may meet a busy disk, or a pause of the machine.
    """

    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW_SAVES))
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW_STEPS))
    _beside: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW_STEPS))
    _steps_beside: int = 0
    _slowed: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW_SAVES))

    def saved(self, stalled_seconds: float) -> None:
        """Note that training has waited for a save."""
        self._note_slowed()
        self._stalls.append(stalled_seconds)

    def stepped(self, seconds: float, *, beside_a_save: bool) -> None:
        """Note how long a step took, and whether a checkpoint was being written meanwhile."""
        if beside_a_save:
            self._beside.append(seconds)
            self._steps_beside += 1
        else:
            self._note_slowed()
            self._usual.append(seconds)

    def seconds(self) -> float | None:
        """Return what a save costs, or None if there was none yet."""
        if not self._stalls:
            return None
        return statistics.median(self._stalls) + (statistics.median(self._slowed) if self._slowed else 0.0)

    def _note_slowed(self) -> None:
        """Add up how much longer the steps beside the last save took; medians, since some steps evaluate."""
        if not self._steps_beside:
            return
        if min(len(self._beside), len(self._usual)) >= _LEAST_STEPS:
            longer = statistics.median(self._beside) - statistics.median(self._usual)
            self._slowed.append(max(0.0, longer) * self._steps_beside)
        self._beside.clear()
        self._steps_beside = 0


class AutoInterval:
    """The save policy behind save="auto": asks for a save when the interval is over, and adapts it.

    `failures` are those of the attempts before, and `before` what they came to, whose measurements count
    until there are own ones. `durable_seconds()` is how long the last save took until it was durable.
    `kept` is called with each interval; `told` with the first, and with each that is a quarter longer or
    shorter than the one that was told before.
    """

    def __init__(
        self,
        failures: Failures,
        *,
        kept: Callable[[SaveInterval], None],
        told: Callable[[SaveInterval], None],
        durable_seconds: Callable[[], float],
        before: SaveInterval | None = None,
    ) -> None:
        self._failures = failures
        self._kept = kept
        self._told = told
        self._before = before
        self._durable_seconds = durable_seconds
        self._costs = SaveCosts()
        self._durable: deque[float] = deque(maxlen=_FEW_SAVES)
        self._began = self._stepped = time.monotonic()
        self._is_writing = self._is_awaited = False
        self._current: SaveInterval | None = None
        self._last_told: SaveInterval | None = None

    def is_due(self, progress: Progress) -> bool:
        # Training would stand still until the one that is being written is done.
        return not self._is_writing and progress.seconds_since_save >= self._interval().seconds

    def saved(self, stalled_seconds: float) -> None:
        """Note that a save has stopped training for so long; it need not be durable yet."""
        self._note_durable()
        self._costs.saved(stalled_seconds)
        self._stepped, self._is_awaited = time.monotonic(), True
        self._adapt()

    def stepped(self, *, is_writing: bool) -> None:
        """Note that the loop has come to the next step, with a checkpoint being written or not."""
        now = time.monotonic()
        self._costs.stepped(now - self._stepped, beside_a_save=is_writing or self._is_writing)
        self._stepped, self._is_writing = now, is_writing
        if not is_writing and self._is_awaited:
            self._note_durable()
            self._adapt()

    def _note_durable(self) -> None:
        # Whoever saves has waited for the save before.
        if self._is_awaited and self._durable_seconds():
            self._durable.append(self._durable_seconds())
        self._is_awaited = False

    def _interval(self) -> SaveInterval:
        return self._current or self._adapt()

    def _adapt(self) -> SaveInterval:
        cost, before = self._costs.seconds(), self._before
        durable = 0.0 if before is None else before.durable_seconds
        found = self._current = save_interval(
            cost_seconds=before.cost_seconds if cost is None and before is not None else cost,
            durable_seconds=statistics.median(self._durable) if self._durable else durable,
            failures=self._failures.count,
            lived_seconds=self._failures.lived_seconds + time.monotonic() - self._began,
        )
        self._kept(found)
        told = self._last_told
        if told is None or not told.seconds / _CHANGE <= found.seconds <= told.seconds * _CHANGE:
            self._last_told = found
            self._told(found)
        return found
