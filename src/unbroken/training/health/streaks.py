"""What is bad as long as it lasts: numbers that are not finite, equal losses, a rate of zero. Pure.

Each is found once, and once more by a run that is resumed while it lasts: somebody else may be watching then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from unbroken.training.health.reading import Onset

# A gradient scaler leaves out steps whose gradients overflow and halves its scale: from the highest it begins
# with to 1 in so many steps.
SCALER_PATIENCE = 24
EQUAL_STEPS = 100
ZERO_STEPS = 5
# Of the highest rate so far: cosines end beside zero.
_ZERO = 1e-9


@dataclass(slots=True)
class _Streak:
    """When a number was good last, and since when it is bad, 0 if it is good; `seen`: as of which step."""

    last_good: int | None = None
    first_bad: int = 0
    seen: int = 0
    is_found: bool = False


class NonFiniteDetector:
    """Finds numbers that are NaN or infinite, each by itself: not all are given in the same steps."""

    def __init__(self) -> None:
        self._streaks: dict[str, _Streak] = {}

    def step(
        self, step: int, values: Mapping[str, float], may_overflow: Callable[[str], bool]
    ) -> Onset | None:
        """Take the numbers of a step that are watched; the first bad step follows the last good one.

        Those that `may_overflow` where a gradient scaler is at work are let pass for some steps.
        """
        found = []
        for name, value in values.items():
            streak = self._streaks.get(name)
            if streak is None:
                streak = self._streaks[name] = _Streak()
            if isfinite(value):
                streak.last_good = step
                if streak.first_bad:
                    streak.first_bad, streak.is_found = 0, False
            elif not streak.is_found and self._is_due(streak, step, may_overflow(name)):
                streak.is_found = True
                found.append((name, streak))
        if not found:
            return None
        bad = " and ".join(f"{name} {values[name]}" for name, _ in found)
        since = min(streak.seen for _, streak in found)
        more = f", not finite since step {since}" if since < step else ""
        return Onset(min(streak.first_bad for _, streak in found), f"{bad} at step {step}{more}")

    def _is_due(self, streak: _Streak, step: int, may_overflow: bool) -> bool:
        if not streak.first_bad:
            streak.seen = step
            streak.first_bad = step if streak.last_good is None else streak.last_good + 1
        return not may_overflow or step - streak.seen >= SCALER_PATIENCE

    @property
    def is_over(self) -> bool:
        return not any(streak.first_bad for streak in self._streaks.values())

    def state(self) -> dict[str, Any]:
        """Return all that decides about later numbers, as plain JSON."""
        return {name: asdict(streak) for name, streak in self._streaks.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self._streaks = {name: _Streak(**{**kept, "is_found": False}) for name, kept in state.items()}


class PlateauDetector:
    """Finds losses that are exactly equal for many steps: nothing is learned.

    That they are so once more at the same loss is nothing new: some are exactly zero most of the time.
    """

    def __init__(self) -> None:
        self._loss: float | None = None
        self._since = 0
        self._count = 0
        self._found: float | None = None

    def step(self, step: int, loss: float) -> Onset | None:
        """Take the loss of a step."""
        if loss != self._loss:
            self._loss, self._since, self._count = loss, step, 1
            return None
        if self._count == EQUAL_STEPS:
            return None
        self._count += 1
        if self._count != EQUAL_STEPS or loss == self._found:
            return None
        self._found = loss
        return Onset(self._since, f"the loss has been exactly {loss!r} since step {self._since}")

    @property
    def is_over(self) -> bool:
        return self._count == 1

    def state(self) -> dict[str, Any]:
        """Return all that decides about later losses, as plain JSON."""
        return {"loss": self._loss, "since": self._since, "count": self._count, "found": self._found}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self._loss, self._since = state["loss"], state["since"]
        lasts = state["count"] == EQUAL_STEPS
        self._count, self._found = state["count"] - lasts, None if lasts else state["found"]


class ZeroRateDetector:
    """Finds learning rates that are all zero while training goes on."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._since = 0
        self._count = 0

    def step(self, step: int, rate: float, goal: Callable[[], int]) -> Onset | None:
        """Take the highest rate after a step; `goal()` is the step after which training is done, or 0."""
        self._highest = max(self._highest, rate)
        if rate > _ZERO * self._highest:
            self._count = 0
            return None
        goal_step = goal()
        # Steps beyond the goal do not count: it may be put off later.
        if self._count == ZERO_STEPS or 0 < goal_step <= step:
            return None
        if not self._count:
            self._since = step
        self._count += 1
        if self._count != ZERO_STEPS:
            return None
        left = f"{goal_step - step} steps are left" if goal_step else "training goes on"
        return Onset(self._since, f"all learning rates are zero since step {self._since}, and {left}")

    @property
    def is_over(self) -> bool:
        return not self._count

    def state(self) -> dict[str, Any]:
        """Return all that decides about later rates, as plain JSON."""
        return {"highest": self._highest, "since": self._since, "count": self._count}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self._highest, self._since = state["highest"], state["since"]
        self._count = min(state["count"], ZERO_STEPS - 1)
