"""A lease: a number in a small file that grows as long as its holder lives.

It tells a living holder from a dead one where no kernel can: on another host, or on a file system
without locks. Clocks of two machines are never compared; who wants to know watches for a change.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.storage.failures import failed

# Long enough for a holder that computes, or swaps, to be late many times over.
LEASE_SECONDS = 60.0
_RENEWALS = 12
_LOOKS = 100
_LOOK_SECONDS = 0.5


class Lease:
    """Renewed in the file at `path` by a thread of this process, from `begin` to `end`.

    The file is of one holder: the next one replaces it. A holder that slept, was taken over and wakes
    up writes into a file that has no name any more.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._ended = threading.Event()
        self._descriptor = -1
        self._file = (0, 0)
        self._process_id = 0

    def begin(self) -> None:
        """Write the first number, in a file of our own, and go on in the background."""
        temporary = self._path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _renew(descriptor, 0)
                os.replace(temporary, self._path)
                self._file = _file(os.fstat(descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise failed("write", self._path, error) from error
        self._process_id, self._descriptor, self._ended = os.getpid(), descriptor, threading.Event()
        threading.Thread(
            target=_go_on,
            args=(descriptor, self._ended, self._seconds / _RENEWALS),
            name="unbroken-lease",
            daemon=True,
        ).start()

    def end(self) -> None:
        """Stop, and remove the file if it is still ours. In a forked child it is the parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._process_id != os.getpid():
            os.close(descriptor)
            return
        # The thread closes the descriptor itself: closed here, its number could be another file's by then.
        self._ended.set()
        with suppress(OSError):
            if _file(os.stat(self._path)) == self._file:
                self._path.unlink()


def _go_on(descriptor: int, ended: threading.Event, pause: float) -> None:
    number = 0
    while not ended.wait(pause):
        number += 1
        # A disk that refuses, or a file that a successor replaced: then the number stands still, and
        # that is all there is to say.
        with suppress(OSError):
            _renew(descriptor, number)
    os.close(descriptor)


def _renew(descriptor: int, number: int) -> None:
    os.pwrite(descriptor, f"{number:016d} {time.time():017.6f}\n".encode(), 0)
    # Closing a copy sends the bytes to the server of a network file system, and costs a disk nothing.
    os.close(os.dup(descriptor))


def _file(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def read_lease(path: Path) -> bytes | None:
    """Return what the file of a lease says now, or None if there is none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failed("read", path, error) from error


def is_changed(look: Callable[[], object], first: object, seconds: float) -> bool:
    """Watch for up to `seconds` whether `look` returns anything else than `first`; returns when it does."""
    until = time.monotonic() + seconds
    pause = min(seconds / _LOOKS, _LOOK_SECONDS)
    while True:
        # The clock first: if this process sleeps in between, what it sees then is newer than the clock.
        is_over = time.monotonic() > until
        if look() != first:
            return True
        if is_over:
            return False
        time.sleep(pause)
