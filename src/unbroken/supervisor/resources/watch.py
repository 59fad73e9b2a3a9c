"""Watches what an attempt uses, and keeps the last reading in the run directory for whoever looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.heartbeat import Beat
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.resources import forecast
from unbroken.supervisor.resources.alarms import alarms
from unbroken.supervisor.resources.course import Course
from unbroken.supervisor.resources.forecast import Pace, Trend
from unbroken.supervisor.resources.reading import Reading
from unbroken.supervisor.resources.usage import (
    DiskSpace,
    Headroom,
    TreeUsage,
    disk_space,
    headroom,
    tree_usage,
)
from unbroken.supervisor.watcher import Look, Started

_EVERY_SECONDS = 5.0
# Where a look costs much, as on a machine with thousands of processes, it is taken less often: all of this
# may use a two-thousandth of a core.
_REST_FOR_EACH_SECOND = 2000.0
_MEMORY_SPAN_SECONDS, _MEMORY_MIN_SECONDS = 1800.0, 300.0
# Checkpoints come seldom, and each at once.
_DISK_SPAN_SECONDS, _DISK_MIN_SECONDS = 6 * 3600.0, 1800.0
_PACES = 120
_RATE_SECONDS = 60.0
_RATE_STEPS = 10
_HOUR_SECONDS = 3600.0


class Resources:
    """Makes the watchers of a run's attempts, and knows what outlasts one of them: its course, its disk."""

    def __init__(self, directory: Path, records: Records) -> None:
        self._directory = directory
        self._records = records
        self._course = Course(directory)
        self._disk = Trend(span_seconds=_DISK_SPAN_SECONDS, min_seconds=_DISK_MIN_SECONDS)
        self._inodes = Trend(span_seconds=_DISK_SPAN_SECONDS, min_seconds=_DISK_MIN_SECONDS)
        self._standing: set[str] = set()
        self._cannot_write = False

    def __call__(self, started: Started) -> AttemptResources:
        return AttemptResources(started, self)

    def disk_full_in_seconds(self, disk: DiskSpace | None, now: float) -> float | None:
        """Return when space or inodes are used up, whichever is first, if they go on as over hours."""
        if disk is None:
            return None
        left: list[tuple[Trend, int | None]] = [
            (self._disk, disk.free_bytes),
            (self._inodes, disk.inodes_free),
        ]
        found = []
        for trend, free in left:
            if free is not None:
                trend.add(now, -free)
                found.append(forecast.seconds_until_used_up(free, trend.growth))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def due_alarms(self, memory: float | None, disk: float | None, share: float | None) -> tuple[str, ...]:
        """Return the alarms in words; those that are new, or over, become events."""
        due = alarms(memory_seconds=memory, disk_seconds=disk, wait_share=share, standing=self._standing)
        kinds = {alarm.kind for alarm in due}
        for alarm in due:
            if alarm.kind not in self._standing:
                self._records.event("alarm", alarm=alarm.kind, text=alarm.text, hint=alarm.hint)
        for kind in sorted(self._standing - kinds):
            self._records.event("alarm-over", alarm=kind)
        self._standing = {*kinds}
        return tuple(f"{alarm.text}: {alarm.hint}" for alarm in due)

    def keep(self, reading: Reading) -> None:
        """Write `reading`, and a row of the run's course if one is due."""
        value = asdict(reading)
        try:
            write_json(self._directory / layout.RESOURCES_FILE, value, durable=False)
            self._course.add(value)
        except StorageError as error:
            # Once: it is tried again every few seconds, and nothing is lost but the view.
            if not self._cannot_write:
                say(f"what the run uses is not shown: could not {error.message}")
            self._cannot_write = True
        else:
            self._cannot_write = False


class AttemptResources:
    """Takes a reading of one attempt every few seconds."""

    def __init__(
        self, started: Started, run: Resources, *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._started = started
        self._run = run
        self._clock = clock
        self._next_look = 0.0
        self._used = Trend(span_seconds=_MEMORY_SPAN_SECONDS, min_seconds=_MEMORY_MIN_SECONDS)
        self._left = Trend(span_seconds=_MEMORY_SPAN_SECONDS, min_seconds=_MEMORY_MIN_SECONDS)
        self._cpu: tuple[float, float] | None = None
        self._paces: list[Pace] = []
        self._process_id = 0

    def look(self, look: Look) -> None:
        """Take a reading if one is due. It never asks for anything."""
        if look.now_seconds < self._next_look:
            return
        began = self._clock()
        self._run.keep(self._read(look))
        cost = self._clock() - began
        self._next_look = look.now_seconds + max(_EVERY_SECONDS, cost * _REST_FOR_EACH_SECOND)

    def end(self) -> None:
        """Nothing is held."""

    def _read(self, look: Look) -> Reading:
        leader = self._started.leader
        # What has lost its parents is a child of this process.
        tree = tree_usage([os.getpid(), leader] if look.has_leader else [os.getpid()])
        room = headroom(leader)
        disk = disk_space(self._started.run_directory)
        self._note_memory(tree, room, look.now_seconds)
        self._note_pace(look.beat, look.now_seconds)
        paces = forecast.recent(self._paces, min_seconds=_RATE_SECONDS, min_steps=_RATE_STEPS)
        share = forecast.data_wait_share(paces) if _is_enough(paces) else None
        memory_full = forecast.seconds_until_used_up(room.left_bytes if room else None, self._left.growth)
        disk_full = self._run.disk_full_in_seconds(disk, look.now_seconds)
        return Reading(
            time=round(time.time(), 3),
            attempt=self._started.attempt,
            step=look.beat.step if look.beat is not None else None,
            steps_per_second=_rounded(forecast.steps_per_second(paces), 6),
            data_wait_share=_rounded(share, 3),
            processes=tree.processes if tree is not None else None,
            cpu_cores=_rounded(self._cpu_cores(tree, look.now_seconds), 2),
            cpu_count=len(os.sched_getaffinity(0)),
            memory_bytes=tree.memory_bytes if tree is not None else None,
            memory_growth_bytes_per_hour=_rounded(_per_hour(self._used.growth), 0),
            memory_left_bytes=room.left_bytes if room is not None else None,
            memory_limit_bytes=room.limit_bytes if room is not None else None,
            memory_limit=room.limit if room is not None else None,
            memory_full_in_seconds=_rounded(memory_full, 0),
            disk_free_bytes=disk.free_bytes if disk is not None else None,
            disk_size_bytes=disk.size_bytes if disk is not None else None,
            disk_full_in_seconds=_rounded(disk_full, 0),
            inodes_free=disk.inodes_free if disk is not None else None,
            alarms=self._run.due_alarms(memory_full, disk_full, share),
        )

    def _note_memory(self, tree: TreeUsage | None, room: Headroom | None, now: float) -> None:
        if tree is not None:
            self._used.add(now, tree.memory_bytes)
        # What runs out is what is left, whoever takes it.
        if room is not None:
            self._left.add(now, -room.left_bytes)

    def _note_pace(self, beat: Beat | None, now: float) -> None:
        if beat is None:
            return
        pace = Pace(seconds=now, step=beat.step, waited_seconds=beat.waited_seconds)
        is_another = beat.process_id != self._process_id
        is_rolled_back = bool(self._paces) and beat.step < self._paces[-1].step
        # Before its first step it starts up, which is no pace.
        has_not_begun = [pace.step for pace in self._paces] == [beat.step]
        if is_another or has_not_begun or is_rolled_back:
            self._paces = []
        self._process_id = beat.process_id
        self._paces = [*self._paces[1 - _PACES :], pace]

    def _cpu_cores(self, tree: TreeUsage | None, now: float) -> float | None:
        if tree is None:
            return None
        before, self._cpu = self._cpu, (now, tree.cpu_seconds)
        if before is None or now <= before[0]:
            return None
        # The time of a process whose parent is gone goes with it.
        return max(0.0, tree.cpu_seconds - before[1]) / (now - before[0])


def _is_enough(paces: Sequence[Pace]) -> bool:
    return len(paces) > 1 and paces[-1].seconds - paces[0].seconds >= _RATE_SECONDS


def _per_hour(rate: float | None) -> float | None:
    return None if rate is None else rate * _HOUR_SECONDS


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
