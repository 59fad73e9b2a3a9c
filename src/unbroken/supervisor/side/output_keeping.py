"""Keeping the output of attempts: when it grew, and no more of it than there is room for.

The output goes straight from the run to its file, so it is bounded where it lies: when the file is larger
than its limit, the disk blocks of its beginning are given back. The file keeps its offsets, and whoever
writes to it notices nothing.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.side.output_times import OutputTimes
from unbroken.supervisor.watcher import Look, Started, Want

# Blocks are given back whole; there is no file system with larger ones.
_ALIGNMENT_BYTES = 1 << 20
LEAST_LIMIT_BYTES = 4 * _ALIGNMENT_BYTES
_LOOK_FOR_RANKS_SECONDS = 5.0
_TRY_AGAIN_SECONDS = 60.0
# Below that a compressed file frees nothing worth a process.
_WORTH_COMPRESSING_BYTES = 64 << 10
_BLOCK_BYTES = 512
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# Where torchrun looks for options that its command line does not give; 3 is stdout and stderr.
_RANK_VARIABLES = ("PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE")
_OUT_AND_ERR = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKeeping:
    """Makes what keeps the output of an attempt; each file of it holds `limit_bytes` at most."""

    limit_bytes: int
    records: Records

    def __call__(self, started: Started) -> OutputKeeper:
        return OutputKeeper(started, limit_bytes=self.limit_bytes, records=self.records)


@dataclass(slots=True)
class _Kept:
    times: OutputTimes
    size_bytes: int = -1
    try_again_seconds: float = field(default=0.0)


class OutputKeeper:
    """Notes when the output of an attempt grew, that of its ranks too, and frees what is too old."""

    def __init__(self, started: Started, *, limit_bytes: int, records: Records) -> None:
        self._attempt = started.attempt
        self._ranks = started.directory / layout.RANKS
        self._limit_bytes = max(limit_bytes, LEAST_LIMIT_BYTES)
        self._records = records
        self._kept: dict[Path, _Kept] = {}
        self._look_for_ranks = 0.0
        self._keep(started.directory / layout.OUTPUT_LOG)

    def look(self, look: Look) -> Want:
        if look.now_seconds >= self._look_for_ranks:
            self._look_for_ranks = look.now_seconds + _LOOK_FOR_RANKS_SECONDS
            self._records.keep_space()
            for log in self._ranks.glob("*/attempt_*/*/std*.log"):
                self._keep(log)
        for log, kept in self._kept.items():
            self._look_at(log, kept, look.now_seconds)
        return None

    def end(self) -> None:
        for log, kept in self._kept.items():
            self._look_at(log, kept, time.monotonic(), is_last=True)

    def _keep(self, log: Path) -> None:
        if log not in self._kept:
            self._kept[log] = _Kept(OutputTimes(layout.output_times(log)))

    def _look_at(self, log: Path, kept: _Kept, now_seconds: float, *, is_last: bool = False) -> None:
        try:
            found = os.stat(log)
            if found.st_size != kept.size_bytes or is_last:
                kept.size_bytes = found.st_size
                kept.times.note(found.st_size, is_last=is_last)
        except OSError:
            # Not there yet, or a disk that takes no note now: the next one covers the same lines.
            return
        is_too_large = found.st_blocks * _BLOCK_BYTES > self._limit_bytes
        if is_too_large and now_seconds >= kept.try_again_seconds:
            self._free(log, kept, found.st_size - self._limit_bytes // 2, now_seconds)

    def _free(self, log: Path, kept: _Kept, end: int, now_seconds: float) -> None:
        try:
            freed_bytes = free_beginning(log, end)
        except OSError as error:
            is_impossible = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
            kept.try_again_seconds = float("inf") if is_impossible else now_seconds + _TRY_AGAIN_SECONDS
            then = "this file system frees no part of a file; all of it is kept" if is_impossible else "later"
            say(f"{log} is larger than its limit, and nothing was freed: {error.strerror}: {then}")
            return
        if freed_bytes:
            name = str(log.relative_to(self._ranks.parent))
            self._records.event("output-freed", attempt=self._attempt, log=name, freed_bytes=freed_bytes)


def free_beginning(log: Path, end: int) -> int:
    """Give back the disk space of the bytes before `end`, and return how many there were; they read as zeros.

    Raises OSError, with EOPNOTSUPP where the file system cannot do this.
    """
    end -= end % _ALIGNMENT_BYTES
    descriptor = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        start = os.lseek(descriptor, 0, os.SEEK_DATA)
        if start >= end:
            return 0
        _punch_hole(descriptor, start, end - start)
        return end - start
    finally:
        os.close(descriptor)


def _punch_hole(descriptor: int, start: int, length: int) -> None:
    # Loaded here: few outputs ever become that large.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    arguments = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), ctypes.c_int64(start), ctypes.c_int64(length)
    if call(ctypes.c_int(descriptor), *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def separate_ranks(environment: Mapping[str, str], run_directory: Path, attempt: int) -> dict[str, str]:
    """Return what makes torchrun keep each rank's output on its own too, unless the user chose for it."""
    if any(name in environment for name in _RANK_VARIABLES):
        return {}
    place = layout.attempt_directory(run_directory, attempt) / layout.RANKS
    return dict(zip(_RANK_VARIABLES, (str(place), _OUT_AND_ERR, _OUT_AND_ERR), strict=True))


def closed_outputs(run_directory: Path) -> list[Path]:
    """Return the outputs that are worth compressing, while no attempt runs: not of the newest attempt."""
    found: list[Path] = []
    try:
        closed = layout.attempts(run_directory)[:-1]
    except StorageError:
        # There will be another time for it.
        return found
    for attempt in closed:
        directory = layout.attempt_directory(run_directory, attempt)
        logs = [directory / layout.OUTPUT_LOG, *(directory / layout.RANKS).glob("*/attempt_*/*/std*.log")]
        found += [log for log in logs if _is_worth_compressing(log)]
    return found


def _is_worth_compressing(log: Path) -> bool:
    try:
        return os.stat(log).st_size >= _WORTH_COMPRESSING_BYTES
    except OSError:
        return False
