"""The pulse of an attempt: a small mapped file that the trainer updates and anyone may read.

Two counters keep apart what is easily confused: `beats` moves with every update, `step` only with
progress. A process that beats without progress is alive, not well.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from unbroken.storage.failures import failed

_MAGIC = b"UNBROKEN-BEAT-01"
# magic, sequence, process id, monotonic ns, wall ns, beats, step, last checkpoint step, phase
_RECORD = struct.Struct("<16sQQQQQQq16s")
_SIZE_BYTES = 4096
_READ_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One reading. `checkpoint_step` is -1 before the first checkpoint of the attempt."""

    process_id: int
    monotonic_seconds: float
    wall_seconds: float
    beats: int
    step: int
    checkpoint_step: int
    phase: str


class Heartbeat:
    """Writes the heartbeat file at `path`; about a microsecond a beat, and no system call.

    Raises StorageError when it is made, on a full disk StorageFullError; a beat raises nothing.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # Not truncated to its size: on a full disk the first beat into a hole would be a SIGBUS,
                # which ends training without a word.
                os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
                self._map = mmap.mmap(descriptor, _SIZE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failed("open", path, error) from error
        self._sequence = 0
        self._beats = 0

    def beat(self, *, phase: str, step: int, checkpoint_step: int) -> None:
        """Record that this process is alive in `phase` (16 bytes at most) with `step` steps done."""
        self._beats += 1
        fields = (
            os.getpid(),
            time.monotonic_ns(),
            time.time_ns(),
            self._beats,
            step,
            checkpoint_step,
            phase.encode(),
        )
        # An odd sequence number tells readers that the record is being changed (a seqlock).
        self._map[: _RECORD.size] = _RECORD.pack(_MAGIC, self._sequence + 1, *fields)
        self._sequence += 2
        self._map[: _RECORD.size] = _RECORD.pack(_MAGIC, self._sequence, *fields)

    def close(self) -> None:
        """Release the mapping; the last beat stays readable."""
        self._map.close()


def read_heartbeat(path: Path) -> Beat | None:
    """Return the last beat in the file at `path`, or None if there is none yet."""
    try:
        for _ in range(_READ_TRIES):
            record = path.read_bytes()[: _RECORD.size]
            if len(record) < _RECORD.size or not record.startswith(_MAGIC):
                return None
            _, sequence, process_id, monotonic, wall, beats, step, saved, phase = _RECORD.unpack(record)
            if sequence % 2 == 0:
                return Beat(
                    process_id=process_id,
                    monotonic_seconds=monotonic / 1e9,
                    wall_seconds=wall / 1e9,
                    beats=beats,
                    step=step,
                    checkpoint_step=saved,
                    phase=phase.rstrip(b"\0").decode(errors="replace"),
                )
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Its writer died in the middle of a beat: there is no reading to trust.
    return None
