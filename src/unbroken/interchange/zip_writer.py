"""Zip files of entries that are stored as they are, written from the beginning to the end.

The form is that of PKWARE's APPNOTE; what is larger than 32 bits can say has the fields of zip64.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

from unbroken.storage.base import Buffer

# What names may have, in bytes: their length is a number of 16 bits.
LONGEST_NAME_BYTES = 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_UTF_8 = 0x800
_PLAIN, _LARGE = 20, 45
# The first day that a zip file knows, so that the same entries make the same file.
_DATE = 1 << 5 | 1
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF
_ZIP64_EXTRA = 1
# The field of Android's tools that pads a header: the alignment, and as many zeros as it takes.
_PADDING_EXTRA = struct.Struct("<3H")
_PADDING = 0xD935


class ZipWriter:
    """Yields the bytes of a zip file, piece by piece."""

    def __init__(self) -> None:
        self._offset = 0
        self._directory: list[bytes] = []

    def entry(self, name: str, pieces: Sequence[Buffer], *, alignment: int = 1) -> Iterator[Buffer]:
        """Yield an entry of the bytes in `pieces`, which begin at a multiple of `alignment` in the file."""
        checksum, size = 0, 0
        for piece in pieces:
            checksum, size = zlib.crc32(piece, checksum), size + memoryview(piece).nbytes
        encoded = name.encode()
        is_large = size >= _MOST_32
        extra = struct.pack("<2H2Q", _ZIP64_EXTRA, 16, size, size) if is_large else b""
        extra += _padding(self._offset + _LOCAL.size + len(encoded) + len(extra), alignment)
        shown = min(size, _MOST_32)
        version = _LARGE if is_large else _PLAIN
        header = _LOCAL.pack(
            *(b"PK\x03\x04", version, _UTF_8, 0, 0, _DATE),
            *(checksum, shown, shown, len(encoded), len(extra)),
        )
        self._directory.append(_listed(encoded, checksum, size, self._offset))
        self._offset += len(header) + len(encoded) + len(extra) + size
        yield header + encoded + extra
        yield from pieces

    def end(self) -> Iterator[Buffer]:
        """Yield the directory of all entries, with which the file is whole."""
        start, count = self._offset, len(self._directory)
        directory = b"".join(self._directory)
        yield directory
        size = len(directory)
        if count >= _MOST_16 or start >= _MOST_32 or size >= _MOST_32:
            yield _END_64.pack(
                *(b"PK\x06\x06", _END_64.size - 12, _LARGE, _LARGE, 0, 0, count, count, size, start)
            )
            yield _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        entries = min(count, _MOST_16)
        yield _END.pack(b"PK\x05\x06", 0, 0, entries, entries, min(size, _MOST_32), min(start, _MOST_32), 0)


def _listed(name: bytes, checksum: int, size: int, offset: int) -> bytes:
    """Return what the directory says of an entry: in zip64, what is too large for its own field."""
    large = [size, size] if size >= _MOST_32 else []
    large += [offset] if offset >= _MOST_32 else []
    extra = struct.pack(f"<2H{len(large)}Q", _ZIP64_EXTRA, 8 * len(large), *large) if large else b""
    version, shown = _LARGE if large else _PLAIN, min(size, _MOST_32)
    header = _CENTRAL.pack(
        *(b"PK\x01\x02", version, version, _UTF_8, 0, 0, _DATE, checksum, shown, shown),
        *(len(name), len(extra), 0, 0, 0, 0, min(offset, _MOST_32)),
    )
    return header + name + extra


def _padding(end: int, alignment: int) -> bytes:
    """Return a field with which a header that ends at `end` ends at a multiple of `alignment`."""
    missing = -end % alignment
    if not missing:
        return b""
    while missing < _PADDING_EXTRA.size:
        missing += alignment
    return _PADDING_EXTRA.pack(_PADDING, missing - 4, alignment).ljust(missing, b"\0")
