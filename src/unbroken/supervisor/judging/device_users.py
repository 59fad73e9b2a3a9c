"""Which processes of an attempt may hold memory of a GPU: noted while they live, nobody can tell later."""

from __future__ import annotations

import os

from unbroken.supervisor.cells import Cell
from unbroken.supervisor.nvml import may_have_gpus
from unbroken.supervisor.resources.usage import tree_members
from unbroken.supervisor.watcher import Look, Started

_FIRST_SECONDS = 1.0
# A look costs some milliseconds where there is no cell: every process of the machine is read.
_MOST_SECONDS = 30.0


class DeviceUsers:
    """Takes note of the processes of an attempt: those of its `cell`, or else below its leader and us."""

    def __init__(self, cell: Cell | None) -> None:
        self._cell = cell
        self._leader = 0
        self._readings: tuple[frozenset[int], ...] = ()
        self._pause = _FIRST_SECONDS
        self._next_look = 0.0 if may_have_gpus() else float("inf")
        self._had_leader = True

    @property
    def process_ids(self) -> frozenset[int]:
        """Those that were there lately; numbers of processes that ended long ago may be a stranger's now."""
        return frozenset().union(*self._readings)

    def watch(self, started: Started) -> DeviceUsers:
        """Return what looks at the attempt that has `started`."""
        self._leader = started.leader
        return self

    def look(self, look: Look) -> None:
        has_just_ended = self._had_leader and not look.has_leader
        if look.now_seconds < self._next_look and not (has_just_ended and self._readings):
            return
        self._had_leader = look.has_leader
        self._next_look = look.now_seconds + self._pause
        self._pause = min(2 * self._pause, _MOST_SECONDS)
        found = self._cell.members() if self._cell is not None else tree_members({self._leader, os.getpid()})
        self._readings = (*self._readings[-1:], frozenset(found))

    def end(self) -> None:
        """Nothing is held."""
