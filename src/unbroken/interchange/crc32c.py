"""CRC-32C, the checksum of TensorFlow's files: by a C library if one is there, else with long integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from unbroken.storage.base import Buffer

# Takes the checksum of what comes before, and the bytes that follow it.
Extend: TypeAlias = Callable[[int, Buffer], int]

_ALL_ONES = 0xFFFFFFFF
# The polynomial with the lowest bit for the highest power, as the checksum has it.
_REFLECTED = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
# Modulo that polynomial, x^6777 = x^484 + x^100 + 1; and so for the powers with all of these doubled.
_HIGH, _MIDDLE, _LOW = 6777, 484, 100
# Longer integers leave the cache of a processor core.
_PIECE_BYTES = 1 << 18


def crc32c(data: Buffer, before: int = 0) -> int:
    """Return the checksum of `data`; `before` is that of what comes before it.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return _extend()(before, data)


def masked(checksum: int) -> int:
    """Return a checksum as the files keep it, so that one of a checksum is none that they hold.

    >>> hex(masked(0xE3069283))
    '0xc78ab0e5'
    """
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & _ALL_ONES


def is_fast() -> bool:
    """Tell whether the C library is there: without it, a second goes by for some hundred megabytes."""
    return _extend() is not extend_with_integers


@cache
def _extend() -> Extend:
    try:
        import google_crc32c
    except ImportError:
        return extend_with_integers
    # Where its C part was not built, it is slower than what stands here.
    if google_crc32c.implementation != "c":
        return extend_with_integers

    def extend_with_library(before: int, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        # It takes bytes alone: small pieces are copied while they are in the cache of a processor core.
        for start in range(0, len(view), _PIECE_BYTES):
            before = google_crc32c.extend(before, bytes(view[start : start + _PIECE_BYTES]))
        return before

    return extend_with_library


def extend_with_integers(before: int, data: Buffer) -> int:
    """The same as `crc32c`, in Python alone."""
    view = memoryview(data).cast("B")
    register = before ^ _ALL_ONES
    for start in range(0, len(view), _PIECE_BYTES):
        register = _folded(register, view[start : start + _PIECE_BYTES])
    return register ^ _ALL_ONES


def _folded(register: int, data: memoryview) -> int:
    """Return the register after `data`: bits at the front are replaced by their remainders."""
    if len(data) < 4:
        return _by_table(register, data)
    bits = len(data) * 8
    number = int.from_bytes(data, "little") ^ register
    while bits > 2 * _HIGH:
        scale = (bits // 2 // _HIGH).bit_length() - 1
        high, middle, low = _HIGH << scale, _MIDDLE << scale, _LOW << scale
        count = min(bits - high, high - middle) & ~7
        first = number & ((1 << count) - 1)
        number >>= count
        number ^= first << high - count
        number ^= first << high - middle - count
        number ^= first << high - low - count
        bits -= count
    return _by_table(0, number.to_bytes(bits // 8, "little"))


def _by_table(register: int, data: Buffer) -> int:
    table = _table()
    for byte in memoryview(data):
        register = table[(register ^ byte) & 0xFF] ^ register >> 8
    return register


@cache
def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (_REFLECTED if register & 1 else 0)
        found.append(register)
    return tuple(found)
