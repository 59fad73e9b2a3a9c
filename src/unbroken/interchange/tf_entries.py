"""What the index of a TensorFlow bundle says: how many files there are, and where each tensor lies."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from unbroken.errors import DamagedError, FormatVersionError
from unbroken.interchange.files import damaged, printable
from unbroken.interchange.protobuf import content, fields, number, signed
from unbroken.interchange.tf_dtypes import ElementType, element_type

# The first element and their number in each dimension; None is all of them.
Extent: TypeAlias = tuple[int, int | None]

_NEWEST_VERSION = 1
_MOST_SHARDS = 99_999
_MOST_DIMENSIONS = 254
_SHORT_BYTES = 64
_LARGEST_TENSOR_BYTES = 1 << 50
# In keys of pieces, what else would end a name.
_ESCAPED = {0: b"\0\xff", 255: b"\xff\0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleHeader:
    """`shards` counts the files of data."""

    shards: int
    is_big_endian: bool


# A named tuple: there is one for every tensor, and a frozen dataclass takes three times as long.
class BundleEntry(NamedTuple):
    """A tensor: `stored_bytes` from `offset` of file number `shard`, or pieces that are entries of their own.

    `size_bytes` is that of all its elements, and 0 for what has no fixed size.
    """

    element: ElementType
    shape: tuple[int, ...]
    size_bytes: int
    shard: int
    offset: int
    stored_bytes: int
    checksum: int
    slices: tuple[tuple[Extent, ...], ...] = ()

    @property
    def dtype(self) -> str:
        return self.element.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def parse_header(value: memoryview, where: str) -> BundleHeader:
    """Return the first entry of an index. Raises DamagedError, FormatVersionError."""
    shards = byte_order = oldest = 0
    for tag, item in fields(value, where):
        if tag == 1:
            shards = number(item, where)
        elif tag == 2:
            byte_order = number(item, where)
        elif tag == 3:
            versions = dict(fields(content(item, where), where))
            oldest = number(versions.get(2, 0), where)
    if oldest > _NEWEST_VERSION:
        raise FormatVersionError(
            printable(f"{where}: expected version {_NEWEST_VERSION} of bundles at most, found {oldest}"),
            hint="read it with the TensorFlow that wrote it",
        )
    if not 0 < shards <= _MOST_SHARDS or byte_order not in (0, 1):
        raise damaged(where, f"a number of files from 1 to {_MOST_SHARDS}", f"{shards}")
    return BundleHeader(shards=shards, is_big_endian=byte_order == 1)


def parse_entry(value: memoryview, where: str) -> BundleEntry:
    """Return the entry of a tensor. Raises DamagedError if no tensor is like that."""
    numbers = {1: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    shape: tuple[int, ...] = ()
    slices = []
    for tag, item in fields(value, where):
        if tag in numbers:
            numbers[tag] = number(item, where)
        elif tag == 2:
            shape = parse_shape(content(item, where), where)
        elif tag == 7:
            slices.append(parse_slice(content(item, where), where))
    element = element_type(numbers[1])
    elements = math.prod(shape)
    size_bytes = elements * (element.item_bytes or 0)
    if size_bytes > _LARGEST_TENSOR_BYTES or elements > _LARGEST_TENSOR_BYTES:
        raise damaged(where, "a tensor that a machine can hold", f"{element.name} {shape}")
    if element.is_number and not slices and size_bytes != numbers[5]:
        raise damaged(where, f"{size_bytes} bytes for {element.name} {shape}", f"{numbers[5]}")
    for extents in slices:
        check_slice(extents, shape, where)
    return BundleEntry(
        element=element,
        shape=shape,
        size_bytes=size_bytes,
        shard=numbers[3],
        offset=numbers[4],
        stored_bytes=0 if slices else numbers[5],
        checksum=numbers[6],
        slices=tuple(slices),
    )


def parse_shape(value: memoryview, where: str) -> tuple[int, ...]:
    """Return the lengths of dimensions. Raises DamagedError if one is not known."""
    if len(value) <= _SHORT_BYTES:
        return _short_shape(bytes(value)) or _parsed_shape(value, where)
    return _parsed_shape(value, where)


# Of many tensors most have the shape of another one.
@lru_cache(maxsize=1024)
def _short_shape(value: bytes) -> tuple[int, ...] | None:
    with suppress(DamagedError):
        return _parsed_shape(memoryview(value), "")
    return None


def _parsed_shape(value: memoryview, where: str) -> tuple[int, ...]:
    lengths = []
    for tag, item in fields(value, where):
        if tag == 2:
            size = dict(fields(content(item, where), where)).get(1, 0)
            lengths.append(signed(number(size, where)))
    if len(lengths) > _MOST_DIMENSIONS or min(lengths, default=0) < 0:
        raise damaged(where, "lengths of dimensions", f"{lengths[:10]}")
    return tuple(lengths)


def parse_slice(value: memoryview, where: str) -> tuple[Extent, ...]:
    """Return the place of a piece in its tensor."""
    extents: list[Extent] = []
    for tag, item in fields(value, where):
        if tag == 1:
            found = dict(fields(content(item, where), where))
            length = signed(number(found[2], where)) if 2 in found else None
            extents.append((signed(number(found.get(1, 0), where)), length))
    return tuple(extents)


def check_slice(extents: tuple[Extent, ...], shape: tuple[int, ...], where: str) -> None:
    """Raise DamagedError unless a piece lies within a tensor of that shape."""
    is_within = len(extents) == len(shape) and all(
        (start == 0 if length is None else start >= 0 and 0 <= length <= size - start)
        for (start, length), size in zip(extents, shape, strict=True)
    )
    if not is_within:
        raise damaged(where, f"pieces within {shape}", f"one at {extents}")


def slice_shape(extents: tuple[Extent, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a piece of a tensor."""
    return tuple(size if length is None else length for (_, length), size in zip(extents, shape, strict=True))


def slice_key(name: bytes, extents: tuple[Extent, ...]) -> bytes:
    """Return the key of a piece: its tensor's name and place, so that they sort as the places do.

    >>> slice_key(b"w", ((0, 2), (0, 3))).hex()
    '00770001010280828083'
    """
    escaped = b"".join(_ESCAPED.get(byte, bytes([byte])) for byte in name)
    found = b"\0" + escaped + b"\0\x01" + _unsigned_key(len(extents))
    for start, length in extents:
        found += _signed_key(start) + _signed_key(-1 if length is None else length)
    return found


def _unsigned_key(value: int) -> bytes:
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _signed_key(value: int) -> bytes:
    """Return seven bits in each byte after as many ones as there are bytes; all are turned if negative."""
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    header = ((1 << size) - 1) << (7 * size)
    return ((value ^ header) & ((1 << 8 * size) - 1)).to_bytes(size, "big")
