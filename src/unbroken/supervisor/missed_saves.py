"""Noticing that no checkpoints come any more, while there still is somebody to ask why."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.rundir.heartbeat import DISK_FULL, Beat
from unbroken.supervisor.records import Records
from unbroken.supervisor.watcher import Look, Started, Want

# Phases in which checkpoints are due; an evaluation may take as long as it likes.
_TRAINING = ("training", "saving")
_FEWEST_INTERVALS = 2
_MOST_INTERVALS = 9
_FACTOR = 2.0
# Checkpoints a few seconds apart come unevenly.
_LEAST_SECONDS = 60.0


def is_missing(intervals_seconds: Sequence[float], since_last_seconds: float) -> bool:
    """Tell whether a checkpoint is overdue, by the intervals between the last ones.

    >>> is_missing([600, 610], 1190), is_missing([600, 610], 1300), is_missing([600], 9000)
    (False, True, False)
    """
    if len(intervals_seconds) < _FEWEST_INTERVALS:
        return False
    return since_last_seconds > max(_LEAST_SECONDS, _FACTOR * _median(intervals_seconds))


def _median(values: Sequence[float]) -> float:
    # The module for this would be the largest in the supervisor.
    return sorted(values)[len(values) // 2]


class SaveRhythm:
    """Learns how often the checkpoints of an attempt come, in time spent on training."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=_MOST_INTERVALS)
        self._looked_at: float | None = None
        self._checkpoint_step = -1
        self._since_last = 0.0
        self._is_told = False
        self._full_looks = 0

    def see(self, beat: Beat, now_seconds: float) -> str | None:
        """Take in a heartbeat, and return why checkpoints are missing, once each time that they are."""
        passed = now_seconds - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now_seconds
        self._full_looks = self._full_looks + 1 if beat.phase == DISK_FULL else 0
        if self._full_looks == 2:
            return "the disk is full, and training waits for space"
        if beat.phase in _TRAINING:
            self._since_last += passed
        if beat.checkpoint_step != self._checkpoint_step:
            self._take_note_of(beat.checkpoint_step)
        elif not self._is_told and is_missing(self._intervals, self._since_last):
            self._is_told = True
            usual, since = _median(self._intervals), self._since_last
            return f"none for {since:.0f} s of training, usually there is one every {usual:.0f} s"
        return None

    def _take_note_of(self, checkpoint_step: int) -> None:
        # The time to the first one is that from the start, which is no interval.
        if self._checkpoint_step >= 0:
            self._intervals.append(self._since_last)
        self._checkpoint_step = checkpoint_step
        self._since_last = 0.0
        self._is_told = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWatch:
    """Makes what records an event when the checkpoints of an attempt stay away."""

    records: Records

    def __call__(self, started: Started) -> _SaveWatcher:
        return _SaveWatcher(started.attempt, self.records)


class _SaveWatcher:
    def __init__(self, attempt: int, records: Records) -> None:
        self._attempt = attempt
        self._records = records
        self._rhythm = SaveRhythm()

    def look(self, look: Look) -> Want:
        if look.beat is None or look.is_stop_asked:
            return None
        reason = self._rhythm.see(look.beat, look.now_seconds)
        if reason is not None:
            self._records.event(
                "saves-missed",
                attempt=self._attempt,
                reason=reason,
                checkpoint_step=look.beat.checkpoint_step,
            )
        return None

    def end(self) -> None:
        return None
