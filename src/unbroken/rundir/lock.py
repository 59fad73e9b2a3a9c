"""One writer per run: a lock the kernel frees when its holder dies, and words about who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unbroken.errors import RunBusyError
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.processes import ProcessIdentity, identify_self, is_alive
from unbroken.storage.failures import failed

# What this process holds, by process and path. The kernel would give a process its own lock again, and
# closing the second descriptor would free the first. A forked child inherits this record but not the
# locks: the number of the process tells.
_held: dict[tuple[int, str], object] = {}


class RunLock:
    """Holds `lock_path` for this process, with who and since when in `holder_path`.

    A POSIX record lock, not flock: it is not inherited by fork, so a data worker that outlives a
    killed trainer by a moment does not keep the next attempt out. Hazard: closing *any* descriptor
    of the lock file in this process frees it, so nothing else may open that file.
    """

    def __init__(self, lock_path: Path, holder_path: Path, *, doing: str = "writes to this run") -> None:
        self._lock_path = lock_path
        self._holder_path = holder_path
        self._doing = doing
        self._descriptor = -1
        self._held_as: tuple[int, str] | None = None

    def acquire(self, **words: Any) -> None:
        """Take the lock and write `words` about its holder.

        Raises RunBusyError with host, process and time of the holder if another process has it, and with
        this process if that has it already, by this lock or another.
        """
        place = (os.getpid(), os.path.realpath(self._lock_path))
        mark = object()
        # Before the file is opened, and in one operation: of two threads, one gets its mark in.
        if _held.setdefault(place, mark) is not mark:
            raise RunBusyError(
                f"{self._lock_path.parent}: process {place[0]}, this one, {self._doing} already",
                hint="leave the `with` block of that run first, or use another run directory",
            )
        try:
            self._take()
            write_json(self._holder_path, {**words, **identify_self().to_json(), "since": time.time()})
        except BaseException:
            self._close()
            del _held[place]
            raise
        self._held_as = place

    def release(self) -> None:
        """Give the lock back; releasing twice is no error.

        In a forked child only the child forgets it: the lock and the holder file are the parent's.
        """
        place, self._held_as = self._held_as, None
        if place is None:
            return
        try:
            if place[0] == os.getpid():
                self._holder_path.unlink(missing_ok=True)
        finally:
            self._close()
            _held.pop(place, None)

    def holder(self) -> tuple[ProcessIdentity, dict[str, Any]] | None:
        """Return who wrote the holder file and all that it says, or None if there is none."""
        words = read_json(self._holder_path)
        identity = ProcessIdentity.from_json(words) if words is not None else None
        return (identity, words) if identity is not None and words is not None else None

    def _take(self) -> None:
        try:
            self._descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise failed("lock", self._lock_path, error) from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise self._busy() from None
        except OSError as error:
            raise failed("lock", self._lock_path, error) from error
        # A file system without working locks lets everybody in; the holder's own words do not.
        holder = self.holder()
        if holder is not None and holder[0] != identify_self() and is_alive(holder[0]):
            raise self._busy()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _busy(self) -> RunBusyError:
        holder = self.holder()
        who = "another process"
        if holder is not None:
            identity, words = holder
            since = datetime.fromtimestamp(float(words.get("since", 0)), UTC).isoformat(timespec="seconds")
            who = f"process {identity.process_id} on {identity.host} since {since}"
        return RunBusyError(
            f"{self._lock_path.parent}: {who} {self._doing}",
            hint="wait for it, stop it with `unbroken stop`, or start in another run directory",
        )
