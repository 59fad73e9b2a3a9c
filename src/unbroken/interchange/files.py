"""Regular files that are read in pieces, and the errors for what is not as it was written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from unbroken.errors import DamagedError, StorageError, UsageError
from unbroken.storage.failures import translated

# Headers are small, many, and close together.
_SMALL_BYTES, _AHEAD_BYTES = 4 << 10, 64 << 10
HINT = "use another copy of it; `unbroken verify` names all that is damaged"
PIECE_BYTES = 8 << 20


class RegularFile:
    """A file that is read in pieces. Not mapped: a failing disk must be an error, not a signal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated("read", str(path)):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: expected a file, found something else", hint="give a checkpoint")
        self.size_bytes = found.st_size
        self._ahead_start, self._ahead = 0, bytearray()

    def read(self, start: int, size_bytes: int) -> bytearray:
        """Return the bytes of a range. Raises DamagedError if the file ends before it does."""
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise damaged(str(self.path), f"at least {start + size_bytes} bytes", f"{self.size_bytes}")
        if size_bytes > _SMALL_BYTES:
            return self._read(start, size_bytes)
        offset = start - self._ahead_start
        if not 0 <= offset <= len(self._ahead) - size_bytes:
            self._ahead = self._read(start, min(_AHEAD_BYTES, self.size_bytes - start))
            self._ahead_start, offset = start, 0
        return self._ahead[offset : offset + size_bytes]

    def _read(self, start: int, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        with translated("read", str(self.path)):
            # A pipe that took its place would block.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                done = _read_into(descriptor, start, memoryview(data))
            finally:
                os.close(descriptor)
        if done < size_bytes:
            raise damaged(str(self.path), f"{self.size_bytes} bytes", f"{start + done}")
        return data

    def pieces(self, start: int, size_bytes: int) -> Iterator[bytearray]:
        """Yield the bytes of a range in pieces that fit into memory."""
        for offset in range(0, size_bytes, PIECE_BYTES):
            yield self.read(start + offset, min(PIECE_BYTES, size_bytes - offset))


def _read_into(descriptor: int, start: int, target: memoryview) -> int:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], start + done)
        if count == 0:
            break
        done += count
    return done


def damaged(where: str, expected: str, found: str) -> DamagedError:
    """The error for bytes that cannot be what was written."""
    return DamagedError(printable(f"{where}: expected {expected}, found {found}"), hint=HINT)


def unreadable(where: str, what: str) -> StorageError:
    """The error for a tensor that is sound but of no form that can be read."""
    return StorageError(printable(f"{where}: {what}"), hint="`unbroken inspect` lists it all the same")


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which no file and no terminal takes, as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return `text` as it can be shown: names from a file must not move the cursor of a terminal."""
    return text if text.isprintable() else repr(text)[1:-1]
