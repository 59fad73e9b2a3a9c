"""Where the time of a run went: what its journals tell, without a gap and without counting twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.dashboard import words
from unbroken.dashboard.course import Course, Times
from unbroken.dashboard.report import Ending, Spent
from unbroken.rundir.journal import number

# What time may have gone into. The place of each is that of its colour.
THINGS = (
    *("training", "waiting for data", "evaluating", "saving"),
    *("superseded work", "starting again", "ending", "between attempts", "not kept going", "starting"),
    "finishing",
)


@dataclass(slots=True)
class _Outside:
    """Seconds in which no attempt made steps, by what they were."""

    first_start: float = 0.0
    starting: float = 0.0
    ending: float = 0.0
    finishing: float = 0.0
    pauses: float = 0.0
    unkept: float = 0.0


def spent_on(
    course: Course,
    *,
    endings: Sequence[Ending],
    supervised: Iterable[Mapping[str, Any]],
    waited: Mapping[int, float],
) -> list[Spent]:
    """Return what the time of a run went into, from its first start to its last event; the useful first.

    `supervised` are the events of the supervisor's journal, `waited` the seconds that training waited for
    batches in each attempt.
    """
    times = list(course.times.values())
    steps, undone = sum(one.steps for one in times), sum(one.undone for one in times)
    saving = _saving(times, course.ordinary_seconds())
    # What it waited for batches that were undone is in there already.
    share = steps / (steps + undone) if steps + undone > 0 else 1.0
    waiting = min(sum(waited.values()) * share, max(0.0, steps - saving))
    again = sum(one.undone_steps for one in times)
    saves = sum(one.saves for one in times)
    outside = _outside(course, endings, _given_up(supervised))
    saved = f"{words.several(saves, 'step')} that followed a save took longer"
    undid = f"{words.several(again, 'step')} that were done again or undone"
    rows = (
        ("training", steps - saving - waiting, False, ""),
        ("waiting for data", waiting, False, ""),
        ("evaluating", sum(one.evaluating for one in times), False, ""),
        ("saving", saving, False, saved),
        ("starting", outside.first_start, False, "for the first time"),
        ("finishing", outside.finishing, False, "the last save, and the end of the program"),
        ("superseded work", undone, True, undid),
        ("starting again", outside.starting, True, "until the state was back"),
        ("ending", outside.ending, True, "last saves, and dying"),
        ("between attempts", outside.pauses, True, "nothing ran"),
        ("not kept going", outside.unkept, True, "stopped or held, until the next start"),
    )
    return [
        Spent(what=what, seconds=seconds, is_lost=is_lost, words=said)
        for what, seconds, is_lost, said in rows
        if seconds > 0
    ]


def _saving(times: Iterable[Times], ordinary: float) -> float:
    return sum(max(0.0, one.after_saves - one.saves * ordinary) for one in times)


def _given_up(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the spans in which nobody kept the run going: from its end to the next start by a user."""
    spans: list[tuple[float, float]] = []
    since: float | None = None
    for event in events:
        time = number(event.get("time"))
        if time is None:
            continue
        if event["kind"] == "run-ended":
            since = time
        elif event["kind"] == "run-started" and since is not None:
            spans.append((since, time))
            since = None
    return spans


def _outside(course: Course, endings: Sequence[Ending], given_up: Sequence[tuple[float, float]]) -> _Outside:
    found = _Outside()
    before: float | None = None
    for ending in endings:
        times = course.times.get(ending.attempt)
        first = times.first if times is not None else None
        started = ending.started if ending.started is not None else first
        last = times.last if times is not None else started
        ended = ending.ended if ending.ended is not None else last
        if started is None or ended is None or last is None:
            continue
        if before is not None:
            pause = max(0.0, started - before)
            unkept = min(pause, sum(max(0.0, min(b, started) - max(a, before)) for a, b in given_up))
            found.unkept += unkept
            found.pauses += pause - unkept
        starting = max(0.0, (first if first is not None else ended) - started)
        if before is None:
            found.first_start = starting
        else:
            found.starting += starting
        passed = max(0.0, ended - last) + (times.ending if times is not None else 0.0)
        if ending is endings[-1] and ending.outcome == "completed":
            found.finishing = passed
        else:
            found.ending += passed
        before = ended
    return found
