"""When a run that makes no progress hangs: a pure judgement by its phase and by how fast it used to go.

What a run is doing decides how long it may take: a step is measured by the steps before it, an evaluation
or a save by the longest one so far. What has not been seen yet has a long limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from unbroken.rundir.heartbeat import DISK_FULL

# The share of its limit at which a silence is worth a word, the stacks are taken, the attempt is ended: at
# its cap at the latest, and its stacks are taken before.
_SLOW, _SUSPECT, _HUNG = 0.5, 1.0, 1.5
_TIMES = 10
_INTERVALS = 200
_FEWEST_STEPS = 50
_WARM_UP_STEPS = 5
# Two batches and two steps; compilers, and memory that is asked for the first time, belong to these.
_EARLY_PROGRESS = 4
_STEP_FLOOR_SECONDS, _STEP_CAP_SECONDS = 180.0, 3600.0
_START_FLOOR_SECONDS, _START_CAP_SECONDS = 600.0, 3600.0
_LONG_FLOOR_SECONDS, _LONG_CAP_SECONDS = 600.0, 6 * 3600.0

# "startup" lasts to the first heartbeat; "compiling" is what comes before the second step of an attempt.
# "disk-full" waits for a human, and says so; what a script does after its training is "done" is its own.
_STARTS = ("startup", "restoring", "compiling")
_STEPS = ("compiling", "training")
_LONG = ("evaluating", "saving", "stopping")
_NEVER = (DISK_FULL, "done")

Degree: TypeAlias = Literal["fine", "slow", "suspect", "hung"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """When a run is taken to hang. `step_seconds` is a limit for each step; without it limits are learned.

    `is_enforced` says whether a run that hangs is ended; it is told of in any case.
    """

    step_seconds: float | None = None
    is_enforced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known of a run's speed, over its attempts.

    `intervals` are seconds a step, the last ones, `steps` how many were measured in all, and `longest`
    is the longest silence so far by phase. At `ended_step` an attempt was ended for its silence.
    """

    intervals: tuple[float, ...] = ()
    steps: int = 0
    longest: Mapping[str, float] = field(default_factory=dict)
    ended_step: int | None = None

    @property
    def usual_seconds(self) -> float | None:
        """The median time of a step, or None if none was measured."""
        return sorted(self.intervals)[len(self.intervals) // 2] if self.intervals else None

    def to_json(self) -> dict[str, Any]:
        return {
            "intervals": list(self.intervals),
            "steps": self.steps,
            "longest": dict(self.longest),
            "ended_step": self.ended_step,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pace:
        """Return the pace written in `value`. Raises KeyError, TypeError or ValueError if it is none."""
        ended_step = value.get("ended_step")
        return cls(
            intervals=tuple(float(seconds) for seconds in value["intervals"]),
            steps=int(value["steps"]),
            longest={str(phase): float(seconds) for phase, seconds in value["longest"].items()},
            ended_step=None if ended_step is None else int(ended_step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look: `beat_seconds` is when the heartbeat was written, by the clock of `now_seconds`.

    `phase` is None before the first heartbeat.
    """

    now_seconds: float
    beat_seconds: float = 0.0
    phase: str | None = None
    step: int = 0
    progress: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """An attempt as seen so far: it is in `phase`, and silent `since_seconds`."""

    pace: Pace
    since_seconds: float
    phase: str = "startup"
    step: int = 0
    steps_here: int = 0
    progress: int = 0
    step_seconds: float = 0.0
    # Whether nothing but training has happened since the last step.
    is_plain: bool = False
    # Whether the silence of now was watched from its beginning: of another one nothing is learned.
    is_whole: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the library has been heard of, in this attempt or an earlier one."""
        return self.phase != "startup" or bool(self.pace.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How long a phase may be silent: a guess, which other signs may outweigh, up to `cap_seconds`."""

    seconds: float
    cap_seconds: float


def begin(pace: Pace, now_seconds: float, *, is_adopted: bool = False) -> Course:
    """Return the course of an attempt that starts now, or goes on if it `is_adopted`."""
    return Course(pace=pace, since_seconds=now_seconds, is_whole=not is_adopted)


def advance(course: Course, sight: Sight) -> Course:
    """Return the course after another look."""
    if sight.phase is None:
        return course
    steps_here = course.steps_here + max(0, sight.step - course.step) if _has_begun(course) else 0
    is_early = sight.phase == "training" and sight.progress < _EARLY_PROGRESS
    phase = "compiling" if is_early else sight.phase
    if phase == course.phase and sight.progress == course.progress and phase not in _NEVER:
        return course
    silent = max(0.0, sight.beat_seconds - course.since_seconds)
    pace = _with_silence(course.pace, course.phase, silent) if course.is_whole else course.pace
    is_step = steps_here > course.steps_here
    if is_step and course.is_plain and steps_here > _WARM_UP_STEPS:
        taken = (sight.beat_seconds - course.step_seconds) / (steps_here - course.steps_here)
        pace = _with_steps(pace, taken, steps_here - course.steps_here)
    return replace(
        course,
        pace=pace,
        since_seconds=max(course.since_seconds, sight.beat_seconds),
        phase=phase,
        step=sight.step,
        steps_here=steps_here,
        progress=sight.progress,
        step_seconds=sight.beat_seconds if is_step else course.step_seconds,
        is_plain=phase == "training" and (is_step or course.is_plain),
        is_whole=True,
    )


def without(course: Course, seconds: float) -> Course:
    """Return the course without the last `seconds`: the attempt was not watched then, or could not run."""
    return replace(course, since_seconds=course.since_seconds + seconds, is_plain=False, is_whole=False)


def ended(course: Course) -> Course:
    """Return the course of an attempt that is ended for its silence."""
    if course.phase not in _STEPS:
        return course
    return replace(course, pace=replace(course.pace, ended_step=course.step))


def limit(policy: HangPolicy, course: Course) -> Limit:
    """Return how long the attempt may be silent in its phase of now; infinite where it may be for ever."""
    if course.phase in _NEVER:
        return Limit(seconds=math.inf, cap_seconds=math.inf)
    if course.phase in _STEPS and course.step == course.pace.ended_step and policy.step_seconds is None:
        # Ended here once, and back in the same silence: it may be an evaluation that nothing tells of.
        return Limit(seconds=_STEP_CAP_SECONDS, cap_seconds=_LONG_CAP_SECONDS)
    longest = course.pace.longest.get(course.phase)
    if course.phase in _STARTS:
        return _learned(longest, _START_FLOOR_SECONDS, _START_CAP_SECONDS)
    if course.phase in _LONG:
        return _learned(longest, _LONG_FLOOR_SECONDS, _LONG_CAP_SECONDS)
    if policy.step_seconds is not None:
        return Limit(seconds=policy.step_seconds, cap_seconds=policy.step_seconds)
    is_learned = course.pace.steps >= _FEWEST_STEPS and course.pace.intervals
    slowest = _slowest(course.pace.intervals) if is_learned else None
    return _learned(slowest, _STEP_FLOOR_SECONDS, _STEP_CAP_SECONDS)


def degree(silent_seconds: float, allowed: Limit, *, moves: bool) -> Degree:
    """Tell what a silence means; `moves` tells that the attempt computes or reads all the same.

    >>> degree(90, Limit(seconds=60, cap_seconds=3600), moves=False)
    'hung'
    >>> degree(90, Limit(seconds=60, cap_seconds=3600), moves=True)
    'suspect'
    """
    end_seconds = allowed.cap_seconds if moves else min(_HUNG * allowed.seconds, allowed.cap_seconds)
    if silent_seconds >= end_seconds:
        return "hung"
    if silent_seconds >= min(_SUSPECT * allowed.seconds, allowed.cap_seconds / _HUNG):
        return "suspect"
    return "slow" if silent_seconds >= _SLOW * allowed.seconds else "fine"


def _has_begun(course: Course) -> bool:
    # The first step that is seen may be that of the checkpoint it goes on from.
    return course.phase not in ("startup", "restoring")


def _with_silence(pace: Pace, phase: str, seconds: float) -> Pace:
    if phase == "training" or seconds <= pace.longest.get(phase, -1.0):
        return pace
    return replace(pace, longest={**pace.longest, phase: seconds})


def _with_steps(pace: Pace, seconds: float, steps: int) -> Pace:
    return replace(pace, intervals=(*pace.intervals, seconds)[-_INTERVALS:], steps=pace.steps + steps)


def _learned(longest: float | None, floor: float, cap: float) -> Limit:
    seconds = cap if longest is None else min(max(_TIMES * longest, floor), cap)
    return Limit(seconds=seconds, cap_seconds=cap)


def _slowest(intervals: tuple[float, ...]) -> float:
    """Return the 99th percentile: all but one in a hundred are as fast."""
    ordered = sorted(intervals)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
