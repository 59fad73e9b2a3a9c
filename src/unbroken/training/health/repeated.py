"""Steps that are done again after a resume, and whether they give what was recorded the first time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.journal import number
from unbroken.rundir.newest_events import NewestEvents
from unbroken.rundir.rollbacks import Rollback

# About forty thousand steps with a metric or two; older ones are not compared.
LIMIT_BYTES = 1 << 22
_GOES_BACK = ("began", "rolled-back")

Metrics = Mapping[str, Any]


def read_recorded(
    directory: Path, *, before: int, step: int, rollbacks: Iterable[Rollback] = ()
) -> dict[int, Metrics]:
    """Return what was recorded of the steps after `step` that count, by the attempts before number `before`.

    `rollbacks` are those since the checkpoint at `step`. The journals are read from their ends, and no more
    of them than `LIMIT_BYTES`: of more steps than are in there, the first are missing. Raises StorageError.
    """
    found: dict[int, Metrics] = {}
    # Later attempts decide from which step on an earlier one does not count any more.
    last = _first_change(rollbacks)
    left = LIMIT_BYTES
    for attempt in reversed([one for one in layout.attempts(directory) if one < before]):
        events = NewestEvents(layout.attempt_directory(directory, attempt) / layout.events_file(), left)
        for event in events:
            at = event.get("step")
            if event["kind"] in _GOES_BACK and isinstance(at, int):
                last = min(last, at)
            elif event["kind"] == "step" and isinstance(at, int):
                if at <= step:
                    return found
                if at <= last:
                    found.setdefault(at, event.get("metrics") or {})
            if last <= step:
                return found
        left -= events.read_bytes
        if left <= 0:
            return found
    return found


def _first_change(rollbacks: Iterable[Rollback]) -> float:
    """Return the last step that a run does as before: then data is left out, or the rates are lower."""
    return min(
        (
            one.trusted_step if one.lower_rate is None else one.lower_rate.from_step
            for one in rollbacks
            if one.windows or one.lower_rate is not None
        ),
        default=math.inf,
    )


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """A metric of a step that is not what it was: `here` now, `there` as recorded."""

    step: int
    metric: str
    here: float
    there: float


@dataclass(slots=True)
class Repeated:
    """Compares steps with what was `recorded` of them, bit for bit.

    Where a step has the metric `loss`, that decides whether it is as before: others may measure the
    machine, such as the time that a step takes. `others` are those of them that differ.
    """

    recorded: Mapping[int, Metrics]
    loss: str
    repeated_steps: int = 0
    equal_steps: int = 0
    first_difference: FirstDifference | None = None
    largest_relative_difference: float = 0.0
    others: set[str] = field(default_factory=set)

    @property
    def last_step(self) -> int:
        """The last step that can be compared, or -1."""
        return max(self.recorded, default=-1)

    def step(self, step: int, values: Mapping[str, float]) -> bool:
        """Compare one step, if it was recorded; return whether its loss is what was recorded."""
        recorded = self.recorded.get(step)
        if recorded is None:
            return False
        there = {name: number(value) for name, value in recorded.items()}
        pairs = {
            name: (values[name], was) for name, was in there.items() if name in values and was is not None
        }
        differing = {name: pair for name, pair in pairs.items() if not is_same(*pair)}
        if self.loss in pairs:
            self.others |= differing.keys() - {self.loss}
            differing = {name: pair for name, pair in differing.items() if name == self.loss}
        self.repeated_steps += 1
        self.equal_steps += not differing
        for name, (here, was) in differing.items():
            self.first_difference = self.first_difference or FirstDifference(step, name, here, was)
            distance = relative_difference(here, was)
            self.largest_relative_difference = max(self.largest_relative_difference, distance)
        return self.loss in pairs and not differing


def is_same(here: float, there: float) -> bool:
    """Tell whether two numbers have the same bits; all NaN count as one.

    >>> is_same(0.0, -0.0), is_same(float("nan"), float("nan")), is_same(2, 2.0)
    (False, True, True)
    """
    return repr(float(here)) == repr(float(there))


def relative_difference(here: float, there: float) -> float:
    """Return how far two numbers are apart, relative to the larger one; infinite where one is not finite.

    >>> relative_difference(1.0, 2.0), relative_difference(float("nan"), 2.0)
    (0.5, inf)
    """
    if not (math.isfinite(here) and math.isfinite(there)):
        return math.inf
    largest = max(abs(here), abs(there))
    return abs(here - there) / largest if largest else 0.0
