"""Training that somebody stopped by job control (SIGSTOP, Ctrl-Z): reported, and left as it is.

Whoever stopped it may have had a reason; only the user says that it goes on.
"""

from __future__ import annotations

from unbroken.rundir.processes import read_stat
from unbroken.supervisor.records import Records
from unbroken.supervisor.watcher import Look, MakeWatcher, Started, Want, Watcher

_STOPPED = "T"
_LOOK_SECONDS = 2.0


def job_control_watch(records: Records) -> MakeWatcher:
    """Return what makes the watchers that report it."""

    def make(started: Started) -> Watcher:
        return _JobControl(started, records)

    return make


def stopped_process(leader: int, trainer: int | None) -> int | None:
    """Return which of the two is stopped by job control, or None."""
    for process_id in {leader, trainer or leader}:
        stat = read_stat(process_id)
        # A tracer stops a process too, for moments, in state t: that is none of it.
        if stat is not None and stat.state == _STOPPED:
            return process_id
    return None


class _JobControl:
    def __init__(self, started: Started, records: Records) -> None:
        self._started = started
        self._records = records
        self._next_look = 0.0
        self._stopped: int | None = None
        self._said = ""

    def look(self, look: Look) -> Want:
        if look.now_seconds < self._next_look:
            return None
        self._next_look = look.now_seconds + _LOOK_SECONDS
        trainer = look.beat.process_id if look.beat is not None else None
        stopped = stopped_process(self._started.leader, trainer)
        if stopped is not None and self._stopped is None:
            self._say("attempt-stopped-by-job-control", stopped)
            self._said = f"process {stopped} is stopped by job control; `kill -CONT {stopped}` lets it go on"
            self._records.show(reason=self._said)
        elif stopped is None and self._stopped is not None:
            self._say("attempt-continued", self._stopped)
            self._take_back()
        self._stopped = stopped
        return None

    def end(self) -> None:
        if self._stopped is not None:
            self._take_back()

    def _take_back(self) -> None:
        # Something else may have been shown meanwhile, a stop or a silence.
        if self._records.snapshot.reason == self._said:
            self._records.show(reason="")

    def _say(self, kind: str, process_id: int) -> None:
        self._records.event(kind, attempt=self._started.attempt, process_id=process_id)
