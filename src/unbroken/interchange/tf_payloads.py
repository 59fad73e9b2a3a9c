"""The bytes of one tensor in a data file of a TensorFlow bundle, and whether their checksum holds."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.interchange.crc32c import crc32c, masked
from unbroken.interchange.files import RegularFile, damaged
from unbroken.interchange.protobuf import varint
from unbroken.interchange.tf_entries import BundleEntry

_CHECKSUM_BYTES = 4
_LONGEST_VARINT_BYTES = 10
_LARGEST_SMALL_LENGTH = (1 << 32) - 1


def check(file: RegularFile, entry: BundleEntry, where: str) -> None:
    """Read a tensor piece by piece. Raises DamagedError if it is not what its checksum says."""
    if entry.element.name == "string":
        found = _strings_checksum(file, entry, where)
    elif entry.element.name == "variant":
        found = _variants_checksum(file, entry, where)
    else:
        found = _checksum(file, entry.offset, entry.stored_bytes)
    compare(entry.checksum, found, where)


def read_numbers(file: RegularFile, entry: BundleEntry, where: str) -> bytearray:
    """Return the bytes of a tensor of numbers. Raises DamagedError if its checksum is another."""
    data = file.read(entry.offset, entry.stored_bytes)
    compare(entry.checksum, crc32c(data), where)
    return data


def read_strings(file: RegularFile, entry: BundleEntry, where: str) -> list[bytes]:
    """Return the elements of a tensor of strings. Raises DamagedError if its checksum is another."""
    check(file, entry, where)
    lengths, start = _lengths(file, entry, where)
    data = bytes(file.read(start + _CHECKSUM_BYTES, sum(lengths)))
    found, end = [], 0
    for length in lengths:
        found.append(data[end : end + length])
        end += length
    return found


def compare(kept: int, checksum: int, where: str) -> None:
    """Raise DamagedError unless a checksum is the one that is kept."""
    if masked(checksum) != kept:
        raise damaged(where, f"CRC-32C {kept:08x}", f"{masked(checksum):08x}")


def _checksum(file: RegularFile, start: int, size_bytes: int, before: int = 0) -> int:
    for piece in file.pieces(start, size_bytes):
        before = crc32c(piece, before)
    return before


def _strings_checksum(file: RegularFile, entry: BundleEntry, where: str) -> int:
    lengths, start = _lengths(file, entry, where)
    found = crc32c(b"".join(map(_as_hashed, lengths)))
    kept = file.read(start, _CHECKSUM_BYTES)
    compare(int.from_bytes(kept, "little"), found, f"{where}: lengths")
    rest = entry.offset + entry.stored_bytes - start - _CHECKSUM_BYTES
    if rest != sum(lengths):
        raise damaged(where, f"{sum(lengths)} bytes of strings", f"{rest}")
    return _checksum(file, start + _CHECKSUM_BYTES, rest, crc32c(kept, found))


def _lengths(file: RegularFile, entry: BundleEntry, where: str) -> tuple[list[int], int]:
    """Return how long the strings are, and where in the file that ends."""
    # A string takes a byte for its length at least.
    if entry.elements > entry.stored_bytes:
        raise damaged(where, f"{entry.elements} strings", f"{entry.stored_bytes} bytes")
    first = min(entry.stored_bytes, entry.elements * _LONGEST_VARINT_BYTES)
    data, position, lengths = memoryview(file.read(entry.offset, first)), 0, []
    for _ in range(entry.elements):
        length, position = varint(data, position, where)
        lengths.append(length)
    if position + _CHECKSUM_BYTES + sum(lengths) > entry.stored_bytes:
        raise damaged(where, f"{entry.stored_bytes} bytes", f"strings of {sum(lengths)}")
    return lengths, entry.offset + position


def _as_hashed(length: int) -> bytes:
    return length.to_bytes(4 if length <= _LARGEST_SMALL_LENGTH else 8, "little")


def _variants_checksum(file: RegularFile, entry: BundleEntry, where: str) -> int:
    """Return the checksum that runs through all elements; each is followed by what it is up to there."""
    found, end = 0, entry.offset + entry.stored_bytes
    position = entry.offset
    if entry.elements > entry.stored_bytes:
        raise damaged(where, f"{entry.elements} elements", f"{entry.stored_bytes} bytes")
    for _ in range(entry.elements):
        head = memoryview(file.read(position, min(_LONGEST_VARINT_BYTES, end - position)))
        length, size = varint(head, 0, where)
        start = position + size
        position = start + length + _CHECKSUM_BYTES
        if position > end:
            raise damaged(
                where, f"{entry.stored_bytes} bytes", f"an element that ends at {position - entry.offset}"
            )
        found = _checksum(file, start, length, crc32c(length.to_bytes(8, "little"), found))
        kept = file.read(start + length, _CHECKSUM_BYTES)
        compare(int.from_bytes(kept, "little"), found, where)
        found = crc32c(kept, found)
    if position != end:
        raise damaged(where, f"{entry.stored_bytes} bytes", f"elements of {position - entry.offset}")
    return found


def unowned(file: RegularFile, places: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file, as start and end, that are in none of `places`, which are sorted."""
    end = 0
    for start, size in places:
        if start > end:
            yield end, start
        end = max(end, start + size)
    if end < file.size_bytes:
        yield end, file.size_bytes
