"""What a report says of a run, as values; the page and `--json` are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from unbroken.dashboard.course import Course, Curve

MarkKind: TypeAlias = Literal["restart", "roll-back", "alarm", "skipped", "not-finite", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why an attempt ended; `outcome` is empty while it runs. `words` are lines for people.

    `resumed` says what its resume has proved.
    """

    attempt: int
    outcome: str
    cause: str = ""
    confidence: str = ""
    words: tuple[str, ...] = ()
    step: int | None = None
    started: float | None = None
    ended: float | None = None
    resumed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to a run. `step` is where it stands on a curve, None if nobody knows.

    `back_to` is the step that the run went on from, of a restart or a roll-back.
    """

    kind: MarkKind
    title: str
    time: float | None = None
    step: int | None = None
    back_to: int | None = None
    attempt: int | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A checkpoint. `note` says what is wrong with it; one that `is_set_aside` lies in quarantine."""

    name: str
    step: int | None
    size_bytes: int | None = None
    created: str = ""
    metrics: Mapping[str, float]
    note: str = ""
    is_set_aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a run that went into one thing, which `what` names; `words` say more of it."""

    what: str
    seconds: float
    is_lost: bool
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it. `made` is when, in seconds since 1970; `problems` are what could not be read."""

    name: str
    directory: str
    made: float
    state: str
    reason: str
    hint: str
    step: int | None
    goal_step: int | None
    attempts: int
    restarts: int
    rollbacks: int
    save_interval: str
    course: Course
    marks: tuple[Mark, ...]
    earlier_marks: int
    spent: tuple[Spent, ...]
    checkpoints: tuple[SavedState, ...]
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as `unbroken report --json` documents it."""
        names = ("name", "directory", "made", "state", "reason", "hint", "step", "goal_step", "attempts")
        more = ("restarts", "rollbacks", "save_interval", "earlier_marks")
        course = self.course
        return {
            **{name: getattr(self, name) for name in (*names, *more)},
            "seconds_per_step": course.ordinary_seconds() or None,
            "metrics": {name: _curve(curve) for name, curve in course.curves.items()},
            "step_seconds": _curve(course.step_seconds),
            "other_metrics": sorted(course.others),
            "marks": [asdict(mark) for mark in self.marks],
            "spent": [asdict(spent) for spent in self.spent],
            "checkpoints": [asdict(one) for one in self.checkpoints],
            "problems": list(self.problems),
        }


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "last": curve.last,
        "low": curve.counting.low(),
        "high": curve.counting.high(),
        "points": [point for line in curve.counting.lines() for point in line],
        "not_finite": curve.counting.not_finite(),
        "superseded": [
            [point for line in thinned.lines() for point in line] for thinned in curve.superseded.values()
        ],
    }
