"""Sorted tables of keys and values, as LevelDB lays them out and TensorFlow writes them: reading."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.interchange.crc32c import crc32c, masked
from unbroken.interchange.files import RegularFile, damaged
from unbroken.interchange.marks import TABLE_FOOTER_BYTES, is_table
from unbroken.interchange.protobuf import encoded_varint, varint
from unbroken.interchange.snappy import unpacked

HANDLES_BYTES = 40
TRAILER_BYTES = 5
_PLAIN, _SNAPPY = 0, 1
_LARGEST_BLOCK_BYTES = 1 << 30
# Each key repeats the beginning of the one before it: a small file could hold very long ones.
_LONGEST_KEY_BYTES = 1 << 14
_MOST_KEY_BYTES = 1 << 27


class Table:
    """An open table. Each block is held against its checksum when it is read, and none is left out."""

    def __init__(self, file: RegularFile) -> None:
        self._file = file
        self._where = str(file.path)
        self._key_bytes = 0
        if not is_table(file):
            raise damaged(self._where, "a table", "a file that does not end like one: it was cut short")
        footer = memoryview(file.read(file.size_bytes - TABLE_FOOTER_BYTES, TABLE_FOOTER_BYTES))
        self._handles = self._read_footer(footer)

    def entries(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the keys, in their order, and the values. Raises DamagedError at what is no whole table."""
        end, last = 0, None
        (meta, meta_bytes), (index, index_bytes) = self._handles
        for _, handle in self._block(index, index_bytes):
            start, position = varint(handle, 0, self._where)
            size, position = varint(handle, position, self._where)
            if start != end or position != len(handle):
                raise damaged(self._where, f"a block at byte {end}", f"one at {start}")
            end = start + size + TRAILER_BYTES
            for key, value in self._block(start, size):
                if last is not None and key <= last:
                    raise damaged(self._where, "keys in their order", f"{key[:100]!r} after {last[:100]!r}")
                last = key
                yield key, value
        self._check_places(end, meta + meta_bytes, index + index_bytes)
        for _ in self._block(meta, meta_bytes):
            pass

    def _check_places(self, end: int, meta_end: int, index_end: int) -> None:
        (meta, _), (index, _) = self._handles
        expected = (end, meta_end + TRAILER_BYTES, self._file.size_bytes - TABLE_FOOTER_BYTES)
        if (meta, index, index_end + TRAILER_BYTES) != expected:
            raise damaged(self._where, "blocks that fill the file", "bytes that are nobody's")

    def _read_footer(self, footer: memoryview) -> tuple[tuple[int, int], tuple[int, int]]:
        numbers, position = [], 0
        for _ in range(4):
            value, position = varint(footer[:HANDLES_BYTES], position, self._where)
            numbers.append(value)
        if bytes(footer[:HANDLES_BYTES]) != encoded_handles(*numbers):
            raise damaged(self._where, "zeros between the places of blocks and the end", "something else")
        return (numbers[0], numbers[1]), (numbers[2], numbers[3])

    def _block(self, start: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
        where = f"{self._where}: block at byte {start}"
        if size > _LARGEST_BLOCK_BYTES:
            raise damaged(where, f"at most {_LARGEST_BLOCK_BYTES} bytes", f"{size}")
        data = memoryview(self._file.read(start, size + TRAILER_BYTES))
        kept, found = int.from_bytes(data[size + 1 :], "little"), masked(crc32c(data[: size + 1]))
        if kept != found:
            raise damaged(where, f"CRC-32C {kept:08x}", f"{found:08x}")
        if data[size] == _SNAPPY:
            return self._parsed(memoryview(unpacked(data[:size], _LARGEST_BLOCK_BYTES, where)), where)
        if data[size] != _PLAIN:
            raise damaged(where, "a block as it is, or packed with snappy", f"kind {data[size]}")
        return self._parsed(data[:size], where)

    def _parsed(self, block: memoryview, where: str) -> Iterator[tuple[bytes, memoryview]]:
        count = int.from_bytes(block[-4:], "little") if len(block) >= 4 else 0
        end, position, key = len(block) - 4 - 4 * count, 0, b""
        if end < 0 or not count:
            raise damaged(where, "places of restarts within it", f"{count} in {len(block)} bytes")
        while position < end:
            shared, position = varint(block, position, where)
            unshared, position = varint(block, position, where)
            length, position = varint(block, position, where)
            if shared > len(key) or position + unshared + length > end:
                raise damaged(where, "an entry within its block", f"one of {unshared} and {length} bytes")
            key = key[:shared] + bytes(block[position : position + unshared])
            self._count_key(len(key), where)
            position += unshared + length
            yield key, block[position - length : position]

    def _count_key(self, size_bytes: int, where: str) -> None:
        self._key_bytes += size_bytes
        if size_bytes > _LONGEST_KEY_BYTES or self._key_bytes > _MOST_KEY_BYTES:
            raise damaged(
                where, f"keys of at most {_MOST_KEY_BYTES} bytes in all", f"{self._key_bytes} and more"
            )


def encoded_handles(*numbers: int) -> bytes:
    """Return the places and sizes of the last two blocks as the end of a table has them."""
    return b"".join(map(encoded_varint, numbers)).ljust(HANDLES_BYTES, b"\0")
