"""The entries of a zip file: where their bytes lie, and whether they are what was written."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import PIECE_BYTES, RegularFile, damaged, unreadable
from unbroken.inspection.formats.slices import FileSlice
from unbroken.storage.base import Buffer

_MAGIC = b"PK\x03\x04"
# The flag of entries whose name is UTF-8.
_UTF_8 = 0x800
_END = b"PK\x05\x06"
_LOCAL = struct.Struct("<4s5H3I2H")
_MOST_ENTRIES = 1_000_000
# The end of the directory with the longest comment, and what stands before it in large files.
_LONGEST_END_BYTES = (1 << 16) + 128
_SEE_ELSEWHERE = 0xFFFF
_KNOWN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Numbers hardly shrink; what is large and grows more than this is no checkpoint but a bomb.
_LARGEST_GROWTH = 20
_LARGE_BYTES = 1 << 30
# What is compressed can be read from its beginning only, for each tensor in it again.
_LARGEST_WORK = 100
_LARGE_WORK_BYTES = 4 << 30
_KEPT_BYTES = 64 << 20
_FAR_BYTES = 1 << 20
DOUBLED = "an entry stands there twice"
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    EOFError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)


class ZipEntries:
    """The entries of the zip file at `path`, or in a range `file` of it.

    Opening it reads the directory of names alone.
    """

    def __init__(self, path: Path, file: FileSlice | None = None) -> None:
        self.file: RegularFile | FileSlice = file or RegularFile(path)
        try:
            with self._archive() as archive:
                found = archive.infolist()
            count = _counted(self.file)
        except OSError as error:
            raise damaged(str(path), "a zip file", str(error)) from error
        except _BROKEN as error:
            raise damaged(str(path), "a whole zip file", f"{error}: it was cut short or changed") from error
        # A changed length inside the directory can swallow entries; what is left still reads well.
        if count != len(found):
            raise damaged(str(path), f"{count} entries", f"{len(found)}")
        if len(found) > _MOST_ENTRIES:
            raise damaged(str(path), f"at most {_MOST_ENTRIES} entries", f"{len(found)}")
        self.entries = {entry.filename: entry for entry in found}
        self.doubled = len(found) != len(self.entries)
        # Writers may leave them out, and then all of them.
        self.has_checksums = any(entry.CRC for entry in found if entry.file_size)
        self._starts: dict[str, int] = {}
        self._work_bytes = 0
        self._kept: tuple[str, bytearray] | None = None

    def sizes(self) -> dict[str, int]:
        """Return the size of each entry."""
        return {name: entry.file_size for name, entry in self.entries.items()}

    def read(self, name: str, *, large_bytes: int = _LARGE_BYTES) -> bytearray:
        """Return the bytes of an entry, held against its checksum. Raises DamagedError.

        What is larger than `large_bytes` must not have been compressed to almost nothing.
        """
        self._check_growth(name, large_bytes)
        data = bytearray()
        for piece in self._pieces(name):
            data += piece
        return data

    def read_range(self, name: str, start: int, size_bytes: int) -> bytearray:
        """Return a range of an entry; of one that is stored as it is, only that range is read."""
        entry = self.entries[name]
        if start < 0 or start + size_bytes > entry.file_size:
            raise damaged(self.at(name), f"{start + size_bytes} bytes", f"{entry.file_size}")
        self._check_growth(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            return self._inflated_range(name, start, size_bytes)
        return self.file.read(self._start_of(name) + start, size_bytes)

    def verify(self) -> Iterator[Finding]:
        """Read all entries, and yield those that are not what their checksums say."""
        for name in self.entries:
            try:
                self._check_growth(name)
                for _ in self._pieces(name):
                    pass
            except DamagedError as error:
                yield Finding(file=name, problem=error.message.removeprefix(f"{self.at(name)}: "))

    def at(self, name: str) -> str:
        """Return where an entry is, for errors."""
        return f"{self.file.path}: {name}"

    def _archive(self) -> zipfile.ZipFile:
        file = self.file
        return zipfile.ZipFile(file.stream() if isinstance(file, FileSlice) else file.path)

    def _pieces(self, name: str) -> Iterator[Buffer]:
        entry, checksum, size = self.entries[name], 0, 0
        pieces: Iterator[Buffer]
        pieces = self._stored(name) if entry.compress_type == zipfile.ZIP_STORED else self._inflated(name)
        for piece in pieces:
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            yield piece
        if size != entry.file_size:
            raise damaged(self.at(name), f"{entry.file_size} bytes", f"{size}")
        if self.has_checksums and checksum != entry.CRC:
            raise damaged(self.at(name), f"CRC-32 {entry.CRC:08x}", f"{checksum:08x}")

    def _stored(self, name: str) -> Iterator[bytearray]:
        entry = self.entries[name]
        if entry.compress_size != entry.file_size:
            raise damaged(self.at(name), f"{entry.file_size} bytes", f"{entry.compress_size}")
        yield from self.file.pieces(self._start_of(name), entry.file_size)

    def _inflated(self, name: str, most_bytes: int | None = None) -> Iterator[bytes]:
        """Yield what is in a compressed entry, or only as much as `most_bytes` of its beginning."""
        left = self.entries[name].file_size + 1 if most_bytes is None else most_bytes
        try:
            with self._archive() as archive, archive.open(self.entries[name]) as source:
                while piece := source.read(min(PIECE_BYTES, left)):
                    left -= len(piece)
                    self._count(name, len(piece))
                    yield piece
        except OSError as error:
            raise damaged(self.at(name), "bytes that can be read", str(error)) from error
        except _BROKEN as error:
            raise damaged(self.at(name), "the bytes that were written", f"{error}") from error

    def _inflated_range(self, name: str, start: int, size_bytes: int) -> bytearray:
        whole = self.entries[name].file_size
        # Of many tensors that lie far inside one entry, each would unpack all those before it.
        if start >= _FAR_BYTES and whole <= _KEPT_BYTES:
            if self._kept is None or self._kept[0] != name:
                self._kept = (name, self._inflated_between(name, 0, whole))
            return self._kept[1][start : start + size_bytes]
        return self._inflated_between(name, start, start + size_bytes)

    def _inflated_between(self, name: str, start: int, end: int) -> bytearray:
        at, data = 0, bytearray()
        for piece in self._inflated(name, end):
            data += piece[max(start - at, 0) :]
            at += len(piece)
        if at < end:
            raise damaged(self.at(name), f"{end} bytes", f"{at}")
        return data

    def _count(self, name: str, size_bytes: int) -> None:
        self._work_bytes += size_bytes
        if self._work_bytes > max(_LARGE_WORK_BYTES, _LARGEST_WORK * self.file.size_bytes):
            raise unreadable(self.at(name), "it would be unpacked again for each of too many tensors")

    def _check_growth(self, name: str, large_bytes: int = _LARGE_BYTES) -> None:
        entry = self.entries[name]
        if entry.compress_type not in _KNOWN:
            raise damaged(self.at(name), "a known compression", f"number {entry.compress_type}")
        largest = max(large_bytes, _LARGEST_GROWTH * entry.compress_size)
        if entry.compress_type != zipfile.ZIP_STORED and entry.file_size > largest:
            raise damaged(self.at(name), f"at most {largest} bytes", f"{entry.file_size}")

    def _start_of(self, name: str) -> int:
        found = self._starts.get(name)
        if found is None:
            found = self._starts[name] = self._read_start(name)
        return found

    def _read_start(self, name: str) -> int:
        entry = self.entries[name]
        fields = _LOCAL.unpack(self.file.read(entry.header_offset, _LOCAL.size))
        start = entry.header_offset + _LOCAL.size
        stored = self.file.read(start, fields[9])
        given = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437", "replace")
        if fields[0] != _MAGIC or stored != given:
            raise damaged(self.at(name), "its own header", "another one")
        return int(start + fields[9] + fields[10])


def _counted(file: RegularFile | FileSlice) -> int:
    """Return how many entries the end of the directory speaks of."""
    start = max(0, file.size_bytes - _LONGEST_END_BYTES)
    tail = bytes(file.read(start, file.size_bytes - start))
    (count,) = struct.unpack_from("<H", tail, tail.rindex(_END) + 10)
    large = tail.rfind(b"PK\x06\x06")
    if count == _SEE_ELSEWHERE and large >= 0:
        (count,) = struct.unpack_from("<Q", tail, large + 32)
    return int(count)
