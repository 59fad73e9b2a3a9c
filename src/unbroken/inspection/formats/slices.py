"""A range of a file that is read as if it were a file: formats put whole files into one another."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from unbroken.inspection.formats.base import PIECE_BYTES, RegularFile, damaged

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Of thousands of small files in one, each is read at once.
_KEPT_BYTES = 1 << 20


class FileSlice:
    """A range of a file. Raises DamagedError if the file ends before it does."""

    def __init__(self, file: RegularFile, start: int, size_bytes: int) -> None:
        if start < 0 or size_bytes < 0 or start + size_bytes > file.size_bytes:
            raise damaged(str(file.path), f"at least {start + size_bytes} bytes", f"{file.size_bytes}")
        self.path = file.path
        self.size_bytes = size_bytes
        self._file = file
        self._start = start
        self._kept = file.read(start, size_bytes) if size_bytes <= _KEPT_BYTES else None

    def read(self, start: int, size_bytes: int) -> bytearray:
        """Return the bytes of a range of it. Raises DamagedError if it ends before that does."""
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise damaged(str(self.path), f"at least {start + size_bytes} bytes", f"{self.size_bytes}")
        if self._kept is not None:
            return self._kept[start : start + size_bytes]
        return self._file.read(self._start + start, size_bytes)

    def pieces(self, start: int, size_bytes: int) -> Iterator[bytearray]:
        """Yield the bytes of a range in pieces that fit into memory."""
        for offset in range(0, size_bytes, PIECE_BYTES):
            yield self.read(start + offset, min(PIECE_BYTES, size_bytes - offset))

    def stream(self) -> IO[bytes]:
        """Return it as an open file."""
        return io.BytesIO(self._kept) if self._kept is not None else io.BufferedReader(_Stream(self))


class _Stream(io.RawIOBase):
    def __init__(self, source: FileSlice) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"position {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, target: Buffer) -> int:
        into = memoryview(target).cast("B")
        size = min(len(into), max(self._source.size_bytes - self._position, 0))
        into[:size] = self._source.read(self._position, size)
        self._position += size
        return size
