"""Space that is kept for the supervisor's own records, and given up piece by piece when the disk is full."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

BALLAST_BYTES = 8_000_000
# A disk with less than this many times its size to spare needs that space more than we do.
_FREE_FACTOR = 10
# Others write to the full disk too, and take what is given up: so not all of it goes at once.
_PIECE_BYTES = 1_000_000
_TRY_AGAIN_SECONDS = 30.0


class Ballast:
    """A file at `path` that holds disk space until `give_up`.

    Nothing here raises: where there can be no ballast there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._not_before = 0.0
        self.keep()

    def keep(self) -> None:
        """Make the ballast whole if it is not and there is room, looking twice a minute at most."""
        if time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + _TRY_AGAIN_SECONDS
        # A disk that is about to be full, or one that cannot set space aside: without it, then.
        with suppress(OSError):
            if self._size_bytes() < BALLAST_BYTES and self._has_room():
                self._make()

    def give_up(self) -> bool:
        """Free a piece of the space, and return whether there was any."""
        # What is free now is for the record that needs it, not for a new ballast.
        self._not_before = time.monotonic() + _TRY_AGAIN_SECONDS
        try:
            size_bytes = self._size_bytes()
            if size_bytes > _PIECE_BYTES:
                os.truncate(self._path, size_bytes - _PIECE_BYTES)
            elif size_bytes:
                self._path.unlink()
        except OSError:
            return False
        return size_bytes > 0

    def remove(self) -> None:
        """Free all of it: the run is over."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _has_room(self) -> bool:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize >= _FREE_FACTOR * BALLAST_BYTES

    def _make(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        finally:
            os.close(descriptor)
