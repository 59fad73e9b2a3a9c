"""What the history of a run comes to: its curves, and where its time went. One reading, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unbroken.dashboard.thinned import Thinned
from unbroken.rundir.effective import Placed, step_of
from unbroken.rundir.journal import number

# Of a chart that is a thousand pixels wide, more could not be seen.
_BUCKETS = 1000
_BUCKETS_OF_SUPERSEDED = 128
_MOST_METRICS = 200
_MOST_SUPERSEDED = 24
# Powers of two by eighths: the middle one is known to within a twentieth.
_PARTS_OF_A_POWER = 8
_TIMED = ("began", "step", "record", "epoch", "rolled-back", "completed", "stopped", "failed")


@dataclass(slots=True)
class Curve:
    """One metric: the values that count, and, by the stretches of work they are of, superseded ones.

    `last` is the newest value that counts, with its step.
    """

    name: str
    counting: Thinned = field(default_factory=lambda: Thinned(_BUCKETS))
    superseded: dict[int, Thinned] = field(default_factory=dict)
    last: tuple[int, float] | None = None

    def take(self, step: int, value: float, *, stretch: int, counts: bool) -> None:
        if not counts:
            if stretch not in self.superseded:
                if len(self.superseded) == _MOST_SUPERSEDED:
                    # The oldest: what was tried last is what people ask about.
                    del self.superseded[next(iter(self.superseded))]
                self.superseded[stretch] = Thinned(_BUCKETS_OF_SUPERSEDED)
            self.superseded[stretch].add(step, value)
            return
        # Held back for one value: an evaluation that is done again replaces what it gave before.
        if self.last is not None and step > self.last[0]:
            self.counting.add(*self.last)
        self.last = step, value

    def finish(self) -> None:
        """Let the last value count, too."""
        if self.last is not None:
            self.counting.add(*self.last)


@dataclass(slots=True)
class Times:
    """Seconds of one attempt, by what they went into; `undone` is all that led to superseded steps.

    `first` and `last` are the times of its first and last event. `left_for` is the step that the run goes
    back to, if the attempt ended for a roll-back. `saving` is by how much a step is longer
    that follows a save, told from an ordinary one when all are known.
    """

    first: float
    last: float
    began_step: int | None = None
    steps: float = 0.0
    undone: float = 0.0
    evaluating: float = 0.0
    ending: float = 0.0
    after_saves: float = 0.0
    saves: int = 0
    done: int = 0
    undone_steps: int = 0
    last_step: int | None = None
    left_for: int | None = None

    @property
    def reached(self) -> int | None:
        """The step at which the attempt ended."""
        return self.began_step if self.last_step is None else self.last_step


@dataclass(slots=True)
class Course:
    """All that is drawn and counted of a history. `others` are metrics that there was no room for.

    `steps` are those that count, `last_step` is the last of them.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    step_seconds: Curve = field(default_factory=lambda: Curve("seconds per step"))
    times: dict[int, Times] = field(default_factory=dict)
    kept: list[Placed] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    steps: int = 0
    last_step: int | None = None
    _gaps: dict[int, int] = field(default_factory=dict)

    def ordinary_seconds(self) -> float:
        """Return how long a step takes, by the median of those that count; 0 without any."""
        left = sum(self._gaps.values()) // 2
        for power, count in sorted(self._gaps.items()):
            left -= count
            if left < 0:
                return float(2.0 ** ((power + 0.5) / _PARTS_OF_A_POWER))
        return 0.0

    def note_gap(self, seconds: float) -> None:
        power = math.floor(math.log2(max(seconds, 1e-6)) * _PARTS_OF_A_POWER)
        self._gaps[power] = self._gaps.get(power, 0) + 1


def course_of(history: Iterable[Placed], *, saved: Mapping[int, set[int]], keep: Iterable[str]) -> Course:
    """Return what the events of `history` come to.

    `saved` are the steps of which each attempt made checkpoints; events of the kinds in `keep` are kept.
    """
    course, kinds = Course(), frozenset(keep)
    reader = _Reader(course, saved)
    for found in history:
        kind = found.event["kind"]
        if kind in ("step", "record"):
            _take_metrics(course, found)
        if kind in kinds:
            # Of an event that names no step, it is the one that the attempt had reached.
            event = {"step": reader.step if reader.attempt == found.attempt else None, **found.event}
            course.kept.append(found._replace(event=event))
        reader.take(found)
    for curve in (*course.curves.values(), course.step_seconds):
        curve.finish()
    return course


def _take_metrics(course: Course, found: Placed) -> None:
    metrics, step = found.event.get("metrics"), step_of(found.event.get("step"))
    if not isinstance(metrics, dict) or step is None:
        return
    for name, written in metrics.items():
        # What `number` does, but for nearly all of them at once.
        value = written if type(written) is float else number(written)
        if value is None:
            continue
        curve = course.curves.get(name)
        if curve is None:
            if len(course.curves) == _MOST_METRICS:
                course.others.add(name)
                continue
            curve = course.curves[name] = Curve(name)
        curve.take(step, value, stretch=found.stretch, counts=found.counts)


class _Reader:
    """Adds up the times between the events of each attempt."""

    def __init__(self, course: Course, saved: Mapping[int, set[int]]) -> None:
        self._course = course
        self._saved = saved
        self.attempt: int | None = None
        self._before: float | None = None
        self.step: int | None = None

    def take(self, found: Placed) -> None:
        kind, time = found.event["kind"], number(found.event.get("time"))
        if time is None or not math.isfinite(time):
            return
        if found.attempt != self.attempt:
            self.attempt, self._before, self.step = found.attempt, None, None
            self._course.times[found.attempt] = Times(first=time, last=time)
        times = self._course.times[found.attempt]
        times.last = max(times.last, time)
        if kind not in _TIMED:
            return
        # A clock that was set back is no time that was gained.
        seconds = max(0.0, time - self._before) if self._before is not None else 0.0
        self._before = time
        self._add(times, found, seconds)
        if kind in ("began", "rolled-back", "step"):
            self.step = step_of(found.event.get("step"))

    def _add(self, times: Times, found: Placed, seconds: float) -> None:
        kind, step = found.event["kind"], step_of(found.event.get("step"))
        if kind == "began":
            times.began_step = step
        elif kind in ("completed", "stopped", "failed"):
            times.ending += seconds
        elif kind == "rolled-back" or not found.counts:
            times.undone += seconds
            times.undone_steps += kind == "step"
        elif kind == "step":
            self._count_step(times, step, seconds, stretch=found.stretch)
        else:
            times.evaluating += seconds
        if kind == "step" or (kind == "rolled-back" and found.event.get("in_process")):
            times.last_step, times.left_for = step, None
        elif kind == "rolled-back":
            times.left_for = step

    def _count_step(self, times: Times, step: int | None, seconds: float, *, stretch: int) -> None:
        times.steps += seconds
        times.done += 1
        self._course.steps += 1
        self._course.last_step = step
        self._course.note_gap(seconds)
        if self.step in self._saved.get(self.attempt or 0, ()):
            times.after_saves += seconds
            times.saves += 1
        if step is not None:
            self._course.step_seconds.take(step, seconds, stretch=stretch, counts=True)
