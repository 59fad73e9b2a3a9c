"""The fields of a protocol buffer message, by their numbers: no description of it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from unbroken.interchange.files import damaged

# Whole numbers of all kinds, and the bytes of texts, messages and packed numbers.
Field: TypeAlias = tuple[int, "int | memoryview"]

_LONGEST_VARINT_BYTES = 10
_FIXED = {1: 8, 5: 4}
_LARGEST = (1 << 64) - 1


def varint(data: memoryview, position: int, where: str) -> tuple[int, int]:
    """Return the number at `position` and where it ends. Raises DamagedError if it does not end."""
    # Most numbers are small.
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    value = shift = 0
    for end in range(position, min(len(data), position + _LONGEST_VARINT_BYTES)):
        value |= (data[end] & 0x7F) << shift
        if not data[end] & 0x80:
            return value, end + 1
        shift += 7
    raise damaged(where, "a number of at most ten bytes", f"none that ends, at byte {position}")


def encoded_varint(value: int) -> bytes:
    """Return a number that is not negative as `varint` reads it.

    >>> encoded_varint(300).hex()
    'ac02'
    """
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def fields(message: memoryview, where: str) -> Iterator[Field]:
    """Yield the fields of a message in their order. Raises DamagedError if it cannot be one."""
    position, end = 0, len(message)
    while position < end:
        # Most tags, numbers and lengths are of one byte: these are not called for.
        tag, position = message[position], position + 1
        if tag > 0x7F:
            tag, position = varint(message, position - 1, where)
        kind = tag & 7
        if kind == 0:
            value, position = varint(message, position, where)
            yield tag >> 3, value & _LARGEST
            continue
        if kind == 2:
            length, position = varint(message, position, where)
        else:
            length = _FIXED.get(kind, -1)
        if length < 0 or position + length > end:
            raise damaged(
                where, "a field within its message", f"kind {kind} of {length} bytes at byte {position}"
            )
        content = message[position : position + length]
        yield tag >> 3, content if kind == 2 else int.from_bytes(content, "little")
        position += length


def signed(value: int) -> int:
    """Return a number of 64 bits as the signed one that it means."""
    return value - (1 << 64) if value >> 63 else value


def number(value: int | memoryview, where: str) -> int:
    """Return the value of a field that is a number. Raises DamagedError if it is none."""
    if not isinstance(value, int):
        raise damaged(where, "a number", f"{len(value)} bytes")
    return value


def content(value: int | memoryview, where: str) -> memoryview:
    """Return the value of a field that is bytes. Raises DamagedError if it is a number."""
    if isinstance(value, int):
        raise damaged(where, "bytes", "a number")
    return value


def text(value: int | memoryview, where: str) -> str:
    """Return the value of a field that is a text; bytes that are none stay visible."""
    return bytes(content(value, where)).decode("utf-8", "backslashreplace")
