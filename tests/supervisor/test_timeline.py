"""What a run has lost by steps that it did again, after roll-backs within a process as well."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from unbroken.rundir import layout
from unbroken.rundir.journal import Journal
from unbroken.supervisor.resources.timeline import read_timeline
from unbroken.supervisor.resources.totals import AttemptTimes, lost

# From which step an attempt began, or was rolled back to, and up to which it then came.
Course = list[tuple[int, int]]


def written(directory: Path, *courses: Course) -> None:
    """The journals of attempts: a second between all that happens."""
    clock = itertools.count(1000)
    with Journal(directory / layout.JOURNAL_FILE) as supervisor:
        supervisor.append("run-started", time=next(clock))
        for attempt, course in enumerate(courses, start=1):
            place = layout.attempt_directory(directory, attempt)
            supervisor.append("attempt-started", time=next(clock), attempt=attempt)
            with (
                Journal(place / layout.events_file()) as events,
                Journal(place / layout.ALARMS_FILE) as alarms,
            ):
                alarms.append("alarm", time=next(clock), what="spike", text="")
                for turn, (start, end) in enumerate(course):
                    kind = "rolled-back" if turn else "began"
                    events.append(kind, time=(now := next(clock)), step=start)
                    if turn:
                        alarms.append("alarm", time=now, what="roll-back", text="")
                    for step in range(start + 1, end + 1):
                        events.append("step", time=next(clock), step=step, metrics={"loss": 0.5})
            supervisor.append("attempt-ended", time=next(clock), attempt=attempt)


@pytest.mark.parametrize(
    ("courses", "seconds"),
    [
        ([[(0, 30)]], 0),
        ([[(0, 10), (6, 20)]], 4),
        # It did not come as far again.
        ([[(0, 10), (6, 6)]], 1),
        ([[(0, 10), (6, 8)]], 3),
        # Back once more before it was as far: that time counts once.
        ([[(0, 10), (4, 8), (4, 20)]], 4 + 1 + 6),
        ([[(0, 10), (6, 20), (15, 30)]], 4 + 5),
        # After a restart, which is as far as before in the middle of what it does again.
        ([[(0, 10)], [(6, 8), (4, 20)]], 2 + 1 + 6),
        ([[(0, 10)], [(6, 20), (15, 30)]], 4 + 5),
        ([[(0, 10), (4, 7)], [(4, 20)]], 4 + 6),
        # Long enough to be read in parts.
        ([[(0, 4000), (3000, 6000), (5000, 6500)], [(6100, 7000)]], 1000 + 1000 + 400),
    ],
)
def test_steps_that_are_done_again_are_lost_wherever_the_run_went_back(
    tmp_path: Path, courses: list[Course], seconds: int
) -> None:
    written(tmp_path, *courses)
    found = read_timeline(tmp_path)
    end = found[-1].ended
    assert end is not None
    assert lost(found, now=end).redoing == seconds
    reached = [max(end for _, end in course) for course in courses]
    assert [attempt.last_step for attempt in found] == reached
    assert all(attempt.last is None or attempt.last <= (attempt.ended or 0) for attempt in found)


def test_what_is_done_again_to_the_end_of_an_attempt_is_not_lost_twice() -> None:
    first = AttemptTimes(started=0, began=1, regained=1, last=20, last_step=9, redone=((15, None),), ended=25)
    then = AttemptTimes(started=30, began=31, began_step=5, regained=40)
    found = lost([first, then], now=50)
    assert (found.redoing, found.ending, found.pauses, found.starting) == (10 + 9, 0, 5, 1)
