"""The journals of all attempts give one history, whatever was killed, resumed, rolled back or torn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.rundir import layout
from unbroken.rundir.effective import Head, History, last_steps, placed
from unbroken.rundir.journal import Journal

Event = dict[str, Any]


def began(step: int) -> Event:
    return {"kind": "began", "step": step}


def rolled_back(step: int) -> Event:
    return {"kind": "rolled-back", "step": step}


def steps(first: int, last: int) -> list[Event]:
    return [{"kind": "step", "step": number} for number in range(first, last + 1)]


def counting(attempts: Sequence[Sequence[Event]]) -> list[tuple[int, int]]:
    """The steps that count, each with the place of its event among all."""
    last = last_steps([Head(event["kind"], event.get("step")) for event in events] for events in attempts)
    found = placed(enumerate(attempts, 1), last)
    return [
        (one.event["step"], place)
        for place, one in enumerate(found)
        if one.counts and one.event["kind"] == "step"
    ]


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], []),
        ([[]], []),
        ([[began(0)]], []),
        ([[began(0), *steps(1, 3)]], [1, 2, 3]),
        # Killed at 3, resumed from 2.
        ([[began(0), *steps(1, 3)], [began(2), *steps(3, 4)]], [1, 2, 3, 4]),
        # Killed before it made a step; what was done before still is superseded.
        ([[began(0), *steps(1, 3)], [began(2)]], [1, 2]),
        # Begun anew, after which the older one counts for nothing.
        ([[began(0), *steps(1, 3)], [began(0), *steps(1, 1)]], [1]),
        ([[began(0), *steps(1, 6), rolled_back(4), *steps(5, 5)]], [1, 2, 3, 4, 5]),
        # Rolled back twice, then resumed from before both.
        ([[began(0), *steps(1, 6), rolled_back(4), *steps(5, 6), rolled_back(4)], [began(2)]], [1, 2]),
        # The line of the roll-back, and that of the beginning, were lost.
        ([[began(0), *steps(1, 6), *steps(5, 7)]], [1, 2, 3, 4, 5, 6, 7]),
        ([[began(0), *steps(1, 3)], steps(3, 4)], [1, 2, 3, 4]),
    ],
)
def test_what_counts_is_what_was_done_last(attempts: list[list[Event]], expected: list[int]) -> None:
    assert [step for step, _ in counting(attempts)] == expected


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[list[Event]], list[tuple[int, int]]]:
    """Attempts of a run that is killed, resumed and rolled back at will, and the steps that should count."""
    attempts: list[list[Event]] = []
    kept: list[tuple[int, int]] = []
    place = 0
    for _ in range(draw(st.integers(0, 5))):
        events: list[Event] = []
        step = draw(st.integers(0, kept[-1][0] if kept else 0))
        is_lost = draw(st.booleans())
        moves = draw(st.lists(st.one_of(st.just("step"), st.integers(0, 6)), max_size=14))
        if not is_lost:
            events.append(began(step))
            place += 1
            kept = [one for one in kept if one[0] <= step]
        for move in moves:
            if move == "step":
                step += 1
                kept = [*(one for one in kept if one[0] < step), (step, place)]
                events.append({"kind": "step", "step": step})
            else:
                step = max(0, step - int(move))
                if is_lost:
                    # What nobody wrote down shows in the next step.
                    continue
                kept = [one for one in kept if one[0] <= step]
                events.append(rolled_back(step))
            place += 1
        attempts.append(events)
    return attempts, kept


@settings(max_examples=60, deadline=None)
@given(lives())
def test_any_life_of_a_run_gives_one_curve_of_increasing_steps(
    life: tuple[list[list[Event]], list[tuple[int, int]]],
) -> None:
    attempts, kept = life
    found = counting(attempts)
    assert found == kept
    numbers = [step for step, _ in found]
    assert numbers == sorted(set(numbers))


def write(directory: Path, attempts: Sequence[Sequence[Event]]) -> Iterator[Path]:
    for number, events in enumerate(attempts, 1):
        path = layout.attempt_directory(directory, number) / layout.events_file()
        with Journal(path) as journal:
            for event in events:
                journal.append(event["kind"], **{name: event[name] for name in event if name != "kind"})
        yield path


def test_torn_lines_missing_journals_and_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    first, _ = write(tmp_path, [[began(0), *steps(1, 3)], [began(2), *steps(3, 4)]])
    layout.attempt_directory(tmp_path, 3).mkdir()
    with first.open("ab") as file:
        file.write(b'{"kind":"alarm","step":3,"text":"caf\\udce9"}\n')
        for line in (b"\n", b"null\n", b"[1]\n", b'{"kind": 7}\n', b'{"step": 3}\n', b"\xff\xfe\n"):
            file.write(line)
        file.write(json.dumps({"kind": "step", "step": True}).encode() + b"\n")
        file.write(b'{"kind":"step","step":4,"metr')
    found = [(one.attempt, one.event.get("step")) for one in History(tmp_path) if one.counts]
    assert [one for one in found if one[1] is not True] == [
        *((1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (2, 4)),
    ]
    (alarm,) = [one for one in History(tmp_path) if one.event["kind"] == "alarm"]
    assert (alarm.counts, alarm.event["text"]) == (False, "caf\udce9")


def test_what_is_appended_while_a_history_is_read_is_left_out(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [[began(0), *steps(1, 3)]])
    history = History(tmp_path)
    list(write(tmp_path, [[rolled_back(1), *steps(2, 2)]]))
    assert path.stat().st_size
    assert [one.event["step"] for one in history] == [0, 1, 2, 3]
    assert [one.event["step"] for one in History(tmp_path) if one.counts] == [0, 1, 1, 2]


def test_a_run_without_an_attempt_has_an_empty_history(tmp_path: Path) -> None:
    assert list(History(tmp_path)) == []
