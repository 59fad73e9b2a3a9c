"""The pulse of an attempt: a small mapped file that the trainer updates and anyone may read.

Counters keep apart what is easily confused: `beats` moves with every update, `progress` with every batch
and step, `step` with optimizer steps. A process that beats without progress is alive, not well.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.storage.failures import failed

# The phase of a run that waits for space on its disk.
DISK_FULL = "disk-full"
_MAGIC = b"UNBROKEN-BEAT-02"
# magic, sequence, process id, monotonic ns, wall ns, beats, step, last checkpoint step, phase,
# progress, last step of all, seconds waited for data, seconds that the last save took
_RECORD = struct.Struct("<16sQQQQQQq16sQQdd")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = 16
_NAMES = (
    *("process_id", "monotonic_seconds", "wall_seconds", "beats", "step", "checkpoint_step", "phase"),
    *("progress", "goal_step", "waited_seconds", "save_seconds"),
)
_SIZE_BYTES = 4096
_READ_TRIES = 100
# A writer that lost its core in the middle of a beat needs time, not only another look.
_PATIENT_TRIES, _PATIENCE_SECONDS = 10, 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One reading. `checkpoint_step` is -1 before the first checkpoint of the attempt.

    `progress` counts the batches and steps of this attempt, `goal_step` is the step after which training
    is done, 0 if nobody knows. `waited_seconds` is how long training has waited for batches in all,
    `save_seconds` how long the last save took until it was durable, 0 before the first.
    """

    process_id: int
    monotonic_seconds: float
    wall_seconds: float
    beats: int
    step: int
    checkpoint_step: int
    phase: str
    progress: int
    goal_step: int
    waited_seconds: float
    save_seconds: float


class Heartbeat:
    """Writes the heartbeat file at `path`; about a microsecond a beat, and no system call.

    The attributes `progress`, `goal_step`, `waited_seconds` and `save_seconds` are as in `Beat`; whoever
    knows them sets them, and the next beat shows them.

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
        # Asked for once: in a forked child the run, and with it the heartbeat, stays its parent's.
        self._process_id = os.getpid()
        self.progress = 0
        self.goal_step = 0
        self.waited_seconds = 0.0
        self.save_seconds = 0.0

    def beat(self, *, phase: str, step: int, checkpoint_step: int) -> None:
        """Record that this process is alive in `phase` (16 bytes at most) with `step` steps done."""
        self._beats += 1
        # An odd sequence number tells readers that the record is being changed (a seqlock).
        _SEQUENCE.pack_into(self._map, _SEQUENCE_AT, self._sequence + 1)
        self._sequence += 2
        _RECORD.pack_into(
            self._map,
            0,
            _MAGIC,
            self._sequence - 1,
            self._process_id,
            time.monotonic_ns(),
            time.time_ns(),
            self._beats,
            step,
            checkpoint_step,
            phase.encode(),
            self.progress,
            self.goal_step,
            self.waited_seconds,
            self.save_seconds,
        )
        _SEQUENCE.pack_into(self._map, _SEQUENCE_AT, self._sequence)

    def close(self) -> None:
        """Release the mapping; the last beat stays readable."""
        self._map.close()


def read_heartbeat(path: Path) -> Beat | None:
    """Return the last beat in the file at `path`, or None if there is none yet."""
    try:
        for tried in range(_READ_TRIES + _PATIENT_TRIES):
            if tried >= _READ_TRIES:
                time.sleep(_PATIENCE_SECONDS)
            record = path.read_bytes()[: _RECORD.size]
            if len(record) < _RECORD.size or not record.startswith(_MAGIC):
                return None
            _, sequence, *fields = _RECORD.unpack(record)
            if sequence % 2 == 0:
                return _beat(fields)
    except OSError:
        # No file yet, or none that can be read: either way nothing is known of its writer.
        return None
    # Its writer died in the middle of a beat: there is no reading to trust.
    return None


def _beat(values: list[Any]) -> Beat:
    fields = dict(zip(_NAMES, values, strict=True))
    fields["monotonic_seconds"] /= 1e9
    fields["wall_seconds"] /= 1e9
    fields["phase"] = fields["phase"].rstrip(b"\0").decode(errors="replace")
    return Beat(**fields)
