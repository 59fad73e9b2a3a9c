"""Stacks on request: a process of a run writes where all of its threads are when it gets a signal.

The handler is written in C, so it answers while Python waits for a lock, a device or a network, and it
needs no right to trace the process. One real-time signal is used that nothing else sends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import IO

from unbroken.rundir import layout
from unbroken.storage.failures import failed

# None where there are no real-time signals (macOS).
STACK_SIGNAL: int | None = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else None


class StackFile:
    """Offers the stacks of this process, the one of `rank`, in the directory of its attempt until `close`.

    Raises StorageError if the file cannot be made.
    """

    def __init__(self, attempt_directory: Path, rank: int) -> None:
        self._path = stack_file(attempt_directory, rank, os.getpid())
        self._file: IO[bytes] | None = None
        if STACK_SIGNAL is None:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("ab")
        except OSError as error:
            raise failed("open", self._path, error) from error
        # What it has at `close` again: a signal that is on its way then must not end the process.
        with suppress(ValueError):
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, self._file, all_threads=True)

    def close(self) -> None:
        """Offer them no more; a file that was never written to is removed."""
        if self._file is None or STACK_SIGNAL is None:
            return
        faulthandler.unregister(STACK_SIGNAL)
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        self._file = None
        if is_empty:
            self._path.unlink(missing_ok=True)


def stack_file(attempt_directory: Path, rank: int, process_id: int) -> Path:
    """Return where the stacks of that process go."""
    return attempt_directory / layout.STACKS / f"rank{rank}-{process_id}.txt"


def catches(process_id: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal; one that has none might be ended by it."""
    try:
        text = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
