"""When the attempts of a run did what, read from the journals that it and its supervisor wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.last_words import ROLL_BACK
from unbroken.supervisor.resources.totals import AttemptTimes

_PIECE_BYTES = 1 << 16


def read_timeline(directory: Path) -> list[AttemptTimes]:
    """Return the times of all attempts that a supervisor started for the run in `directory`.

    Of a journal of steps, however long, only a few pieces are read. Raises StorageError.
    """
    found: list[AttemptTimes] = []
    farthest = -1
    for number, times in _starts_and_ends(directory):
        full = _with_steps(times, layout.attempt_directory(directory, number), farthest)
        farthest = max(farthest, full.last_step)
        found.append(full)
    # A supervisor that was killed could not write down the end of its attempt.
    return [*(_ended_at_last(times) for times in found[:-1]), *found[-1:]]


def _starts_and_ends(directory: Path) -> Iterator[tuple[int, AttemptTimes]]:
    attempts: dict[int, AttemptTimes] = {}
    given_up: float | None = None
    unkept = 0.0
    for event in read_events(directory / layout.JOURNAL_FILE):
        match event["kind"]:
            case "run-ended":
                given_up = event["time"]
            case "run-started" if given_up is not None:
                unkept += event["time"] - given_up
                given_up = None
            case "attempt-started":
                attempts[event["attempt"]] = AttemptTimes(started=event["time"], unkept_seconds=unkept)
                unkept = 0.0
            case "attempt-ended" if event["attempt"] in attempts:
                attempts[event["attempt"]] = replace(attempts[event["attempt"]], ended=event["time"])
    yield from sorted(attempts.items())


def _with_steps(times: AttemptTimes, directory: Path, farthest: int) -> AttemptTimes:
    try:
        with (directory / layout.events_file()).open("rb") as file:
            whole = _Steps(file, 0, os.fstat(file.fileno()).st_size)
            began = whole.began()
            if began is None:
                return times
            began_step = int(began["step"])
            rolled_back = _rolled_back(directory)
            stretches = whole.parted(rolled_back)
            regained = began if began_step >= farthest else _first_at(farthest, stretches)
            ends = [stretch.last() for stretch in stretches]
            made = [event for event in ends if event is not None]
            return replace(
                times,
                began=began["time"],
                began_step=began_step,
                regained=None if regained is None else regained["time"],
                last=made[-1]["time"] if made else None,
                last_step=max([began_step, *(int(event["step"]) for event in made)]),
                redone=tuple(_redone(rolled_back, stretches, ends, max(farthest, began_step))),
            )
    except OSError:
        # A command without the library writes no steps.
        return times


def _rolled_back(directory: Path) -> list[float]:
    """Return when the attempt in `directory` was rolled back, from the alarms, which are few."""
    alarms = read_events(directory / layout.ALARMS_FILE)
    return [event["time"] for event in alarms if event.get("what") == ROLL_BACK]


def _redone(
    rolled_back: Sequence[float],
    stretches: Sequence[_Steps],
    ends: Sequence[dict[str, Any] | None],
    reached: int,
) -> Iterator[tuple[float, float | None]]:
    """Yield when each roll-back was, and when training was as far again; it had `reached` a step before."""
    for number, at in enumerate(rolled_back):
        end = ends[number]
        reached = max(reached, -1 if end is None else int(end["step"]))
        again = _first_at(reached, stretches[number + 1 :])
        yield at, None if again is None else again["time"]


def _first_at(step: int, stretches: Sequence[_Steps]) -> dict[str, Any] | None:
    """Return the event of the first step from `step` on."""
    found = (stretch.first(lambda event: bool(event["step"] >= step)) for stretch in stretches)
    return next((event for _, event in filter(None, found)), None)


def _ended_at_last(times: AttemptTimes) -> AttemptTimes:
    if times.ended is not None:
        return times
    return replace(times, ended=max(times.started, times.began or 0.0, times.last or 0.0))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The journal of an attempt's steps, from a line that begins at `start` to `end`.

    Times only rise, and so do the numbers of steps between two roll-backs: they can be bisected.
    """

    file: BinaryIO
    start: int
    end: int

    def began(self) -> dict[str, Any] | None:
        return next((event for _, event in self._events(0, _PIECE_BYTES, "began")), None)

    def parted(self, moments: Sequence[float]) -> list[_Steps]:
        """Return the parts before, between and after `moments`, which are in order."""
        borders = [self.start]
        for moment in moments:
            found = self.first(_is_after(moment))
            borders.append(self.end if found is None else found[0])
        return [_Steps(self.file, start, end) for start, end in pairwise([*borders, self.end])]

    def last(self) -> dict[str, Any] | None:
        # Usually in the first piece; a run that evaluates or prunes for long has more behind its last step.
        length = _PIECE_BYTES
        while True:
            found = None
            for _, event in self._events(max(self.start, self.end - length), self.end, "step"):
                found = event
            if found is not None or length >= self.end - self.start:
                return found
            length *= 8

    def first(self, is_reached: Callable[[dict[str, Any]], bool]) -> tuple[int, dict[str, Any]] | None:
        """Return the first step that `is_reached`, as all after it are, and where its line begins."""
        low, high = self.start, self.end
        while high - low > _PIECE_BYTES:
            middle = (low + high) // 2
            found = next((event for _, event in self._events(middle, high, "step")), None)
            if found is None or is_reached(found):
                high = middle
            else:
                low = middle
        # The line at `high` may begin before it.
        return next((one for one in self._events(low, self.end, "step") if is_reached(one[1])), None)

    def _events(self, start: int, end: int, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the events of `kind` whose line begins after `start`, or at our start, and before `end`.

        With each is where its line begins.
        """
        mark = f'"kind":"{kind}"'.encode()
        self.file.seek(start)
        position = start
        if start > self.start:
            position += len(self.file.readline())
        while position < end and (line := self.file.readline()):
            begins, position = position, position + len(line)
            # Cheaper than to parse all the others.
            event = _parse(line) if mark in line else None
            if event is not None and event["kind"] == kind:
                yield begins, event


def _is_after(moment: float) -> Callable[[dict[str, Any]], bool]:
    return lambda event: bool(event["time"] > moment)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_whole = isinstance(event, dict) and isinstance(event.get("step"), int) and "time" in event
    return event if is_whole else None
