"""Losses far above those before them: the ratio to a running median, and the noise around it. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import inf, isfinite
from typing import Any

from unbroken.training.health.reading import Onset, Reading

# Losses of so many steps are what is usual. Few enough that one that falls by a tenth of itself in each five
# steps is compared with what it was of late.
_WINDOW = 32
# A loss is noise while its distance from the median is below so many usual changes from step to step.
_NOISES = 8.0
# A lone loss is nothing new while it is within so many times the largest distance met so far. That is more
# than so many usual changes only if the noise has a heavy tail; then the next may be far larger again.
_BEYOND_LARGEST = 5.0
_HEAVY_TAIL = 2.5
# What was met is forgotten slowly: by half in seven hundred steps.
_FORGET = 0.999
# High losses of so many steps in a row need to be half as far, and that much farther than all in the window:
# of a mixture of easy and hard batches, some hard ones follow each other soon.
_IN_A_ROW = 3
_BEYOND_WINDOW = 1.5
# Below so many losses a median says little.
_FEWEST = 8
# Of the highest level of the run: smaller changes do not count.
FLOOR = 0.002
# Keeps the state finite.
_HIGHEST_SCORE = 1e12
_NUMBERS = ("to_learn", "before", "largest", "largest_alone", "size", "top")


class SpikeDetector:
    """Learns what losses are usual, and finds one far above them, or three in a row half as far.

    A distance is measured in medians: a loss of 4 where 1 is usual has the score 3.
    """

    def __init__(self, factor: float, warm_up_steps: int) -> None:
        self._score = factor - 1
        self._warm_up = warm_up_steps
        self._largest = self._largest_alone = self._size = self._top = self._before = 0.0
        self._restart(warm_up_steps)

    def step(self, reading: Reading) -> Onset | None:
        """Take the loss of a step."""
        if reading.rate is not None:
            self._note_rate(reading.rate)
        loss = reading.loss
        level, unit = self._level_and_unit()
        noise = self._sorted_changes[len(self._sorted_changes) // 2] if self._sorted_changes else 0.0
        distance = loss - level
        score = min(distance / unit, _HIGHEST_SCORE) if unit else 0.0
        # Where losses rise little by little, that says nothing of how far a single one may be off.
        alone = max(0.0, min(score, (loss - self._before) / unit)) if unit else 0.0
        self._before = loss
        self._largest *= _FORGET
        self._largest_alone *= _FORGET
        if self._to_learn:
            self._to_learn -= 1
            is_known = len(self._window) >= _FEWEST
            self._note(loss, *self._bounded(score, alone) if is_known else (0.0, 0.0))
            return None
        if score <= self._score / 2 or distance <= _NOISES / 2 * noise:
            if self._high:
                self._note_high()
            self._note(loss, score, alone)
            return None
        self._high.append((reading.since, reading.step, loss, score, alone))
        highest = _BEYOND_WINDOW * (self._sorted[-1] - level) / unit
        is_far = (
            score > max(self._score, highest)
            and distance > _NOISES * noise
            and self._is_far(alone, unit, noise)
        )
        is_lasting = self._is_lasting(highest)
        if not (is_far or is_lasting):
            if len(self._high) == _IN_A_ROW:
                self._note(*self._high.pop(0)[2:])
            return None
        onset = Onset(self._high[0][0], self._in_words(level), level + self._score / 2 * unit)
        if is_lasting:
            # If it is only told, and training goes on, this is what is usual now.
            self._restart(self._warm_up)
        else:
            loss, score, alone = self._high.pop()[2:]
            self._note_high()
            self._note(loss, *self._bounded(score, alone))
        return onset

    def state(self) -> dict[str, Any]:
        """Return all that decides about later losses, as plain JSON."""
        numbers = {name: getattr(self, f"_{name}") for name in _NUMBERS}
        return {
            "window": list(self._window),
            "rates": list(self._rates),
            "high": [list(one) for one in self._high],
            **numbers,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self._restart(0)
        for loss in state["window"]:
            self._learn(loss)
        for rate in state["rates"]:
            _push(self._rates, self._sorted_rates, rate)
        self._high += [(*one,) for one in state["high"]]
        for name in _NUMBERS:
            setattr(self, f"_{name}", state[name])

    def _restart(self, to_learn: int) -> None:
        self._to_learn = to_learn
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._sorted: list[float] = []
        # The changes from one loss in the window to the next.
        self._changes: deque[float] = deque(maxlen=_WINDOW - 1)
        self._sorted_changes: list[float] = []
        self._rates: deque[float] = deque(maxlen=_WINDOW)
        self._sorted_rates: list[float] = []
        self._high: list[tuple[int, int, float, float, float]] = []
        self._is_around_zero = False

    def _note_rate(self, rate: float) -> None:
        """Learn anew where the rate jumps up: at a warm restart the losses jump, too, and nothing is bad."""
        rates = self._sorted_rates
        if rates and rate > 2 * rates[len(rates) // 2]:
            self._restart(max(self._to_learn, min(_WINDOW, self._warm_up)))
        _push(self._rates, self._sorted_rates, rate)

    def _level_and_unit(self) -> tuple[float, float]:
        """Return the median of the losses, and what distances are measured in: their median size.

        Around zero the losses of a few steps may all be small: there it is the largest such size of late.
        """
        losses = self._sorted
        if not losses:
            return 0.0, 0.0
        level = losses[len(losses) // 2]
        size = abs(level)
        self._size *= _FORGET
        self._is_around_zero = losses[0] < 0 < losses[-1] or losses[len(losses) // 4] == 0
        if self._is_around_zero:
            # Those that are exactly zero, as errors that are counted, tell nothing of how large others are.
            sizes = sorted(abs(loss) for loss in losses if loss)
            size = self._size = max(self._size, sizes[len(sizes) // 2] if sizes else 0.0)
        self._top = max(self._top, size)
        least = FLOOR * self._top
        return level, max(size, least)

    def _is_far(self, alone: float, unit: float, noise: float) -> bool:
        """Tell whether this loss alone is enough."""
        largest = self._largest_alone
        tail = largest * unit / (_HEAVY_TAIL * noise) if noise else 0.0
        return alone > largest * max(_BEYOND_LARGEST, tail * tail)

    def _is_lasting(self, least: float) -> bool:
        """Tell whether there are enough in a row, with scores above `least`."""
        least = max(least, self._largest if self._is_around_zero else self._largest / 2)
        return len(self._high) == _IN_A_ROW and all(score > least for *_, score, _ in self._high)

    def _note_high(self) -> None:
        for _, _, *high in self._high:
            self._note(*high)
        self._high.clear()

    def _bounded(self, score: float, alone: float) -> tuple[float, float]:
        """Return what is remembered of a loss that may be out of all proportion: it blinds for long."""
        return (
            min(score, 2 * max(self._score, self._largest)),
            min(alone, 2 * max(self._score, self._largest_alone)),
        )

    def _note(self, loss: float, score: float, alone: float) -> None:
        self._largest = max(self._largest, score)
        self._largest_alone = max(self._largest_alone, alone)
        self._learn(loss)

    def _learn(self, loss: float) -> None:
        if self._window:
            _push(self._changes, self._sorted_changes, abs(loss - self._window[-1]))
        _push(self._window, self._sorted, loss)

    def _in_words(self, level: float) -> str:
        _, step, loss, *_ = max(self._high, key=lambda one: one[2])
        count = len(self._high)
        others = f", the highest of {count} in a row," if count > 1 else ""
        ratio = inf if self._is_around_zero or level <= 0 else loss / level
        times = f"{ratio:.3g} times" if isfinite(ratio) else "far above"
        usual = f"the median of the last {len(self._window)} ({level:.6g})"
        return f"loss {loss:.6g} at step {step}{others} is {times} {usual}"


def _push(recent: deque[float], ordered: list[float], value: float) -> None:
    """Add `value` to the recent values and to the same in order; the oldest goes if there are too many."""
    if len(recent) == recent.maxlen:
        del ordered[bisect_left(ordered, recent[0])]
    recent.append(value)
    insort(ordered, value)
