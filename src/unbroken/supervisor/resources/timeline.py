"""When the attempts of a run did what, read from the journals that it and its supervisor wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.supervisor.resources.totals import AttemptTimes

_PIECE_BYTES = 1 << 16


def read_timeline(directory: Path) -> list[AttemptTimes]:
    """Return the times of all attempts that a supervisor started for the run in `directory`.

    Of a journal of steps, however long, only a few pieces are read. Raises StorageError.
    """
    found: list[AttemptTimes] = []
    farthest = -1
    for number, times in _starts_and_ends(directory):
        path = layout.attempt_directory(directory, number) / layout.events_file()
        full = _with_steps(times, path, farthest)
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


def _with_steps(times: AttemptTimes, path: Path, farthest: int) -> AttemptTimes:
    try:
        with path.open("rb") as file:
            steps = _Steps(file, os.fstat(file.fileno()).st_size)
            began, last = steps.began(), steps.last()
            if began is None:
                return times
            began_step = int(began["step"])
            regained = began if began_step >= farthest else steps.first_at(farthest)
            return replace(
                times,
                began=began["time"],
                began_step=began_step,
                regained=None if regained is None else regained["time"],
                last=None if last is None else last["time"],
                last_step=began_step if last is None else int(last["step"]),
            )
    except OSError:
        # A command without the library writes no steps.
        return times


def _ended_at_last(times: AttemptTimes) -> AttemptTimes:
    if times.ended is not None:
        return times
    return replace(times, ended=max(times.started, times.began or 0.0, times.last or 0.0))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The journal of an attempt's steps: their times and numbers only rise, so that it can be bisected."""

    file: BinaryIO
    size: int

    def began(self) -> dict[str, Any] | None:
        return next(self._events(0, _PIECE_BYTES, "began"), None)

    def last(self) -> dict[str, Any] | None:
        # Usually in the first piece; a run that evaluates or prunes for long has more behind its last step.
        length = _PIECE_BYTES
        while True:
            found = None
            for event in self._events(max(0, self.size - length), self.size, "step"):
                found = event
            if found is not None or length >= self.size:
                return found
            length *= 8

    def first_at(self, step: int) -> dict[str, Any] | None:
        """Return the event of the first step from `step` on."""
        low, high = 0, self.size
        while high - low > _PIECE_BYTES:
            middle = (low + high) // 2
            found = next(self._events(middle, high, "step"), None)
            if found is None or found["step"] >= step:
                high = middle
            else:
                low = middle
        # The line at `high` may begin before it.
        return next((event for event in self._events(low, self.size, "step") if event["step"] >= step), None)

    def _events(self, start: int, end: int, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the events of `kind` whose line begins after `start`, or at 0, and before `end`."""
        mark = f'"kind":"{kind}"'.encode()
        self.file.seek(start)
        position = start
        if start:
            position += len(self.file.readline())
        while position < end and (line := self.file.readline()):
            position += len(line)
            # Cheaper than to parse all the others.
            event = _parse(line) if mark in line else None
            if event is not None and event["kind"] == kind:
                yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_whole = isinstance(event, dict) and isinstance(event.get("step"), int) and "time" in event
    return event if is_whole else None
