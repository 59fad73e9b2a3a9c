"""Floating-point numbers as those of another kind: rounded to the nearest, ties to even, without a library.

Whole pieces are one integer each, so that Python adds and masks thousands of elements at once.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from unbroken.inspection.closeness import pieces
from unbroken.inspection.formats.base import DTYPE_BITS

# What tensors can be cast to.
CASTS = ("F64", "F32", "BF16", "F16")
# From here on the nearest number of 16 bits, of which 11 are of the fraction, is infinite.
_BEYOND_F16 = 65520.0
# The bits of the exponent: where all are set, the element is infinite or NaN.
_EXPONENTS = {
    "F64": 0x7FF0 << 48,
    "F32": 0x7F80 << 16,
    "BF16": 0x7F80,
    "F16": 0x7C00,
}


@dataclass(frozen=True, slots=True)
class _Eight:
    """A kind of 8 bits: those of its fraction, what is subtracted from its exponent, and what is no number.

    `infinite` and `nan` are the bits without the sign; `has_negative_zero` is false where these bits are NaN.
    """

    fraction: int
    bias: int
    infinite: int | None
    nan: range
    has_negative_zero: bool = True


_EIGHT: Mapping[str, _Eight] = {
    "F8_E4M3": _Eight(3, 7, None, range(0x7F, 0x80)),
    "F8_E5M2": _Eight(2, 15, 0x7C, range(0x7D, 0x80)),
    "F8_E4M3FNUZ": _Eight(3, 8, None, range(0), has_negative_zero=False),
    "F8_E5M2FNUZ": _Eight(2, 16, None, range(0), has_negative_zero=False),
}
_POWERS_OF_TWO = "F8_E8M0"
# What is cast: complex numbers, integers and truth values are not, nor is what is smaller than a byte.
CASTABLE = frozenset({*CASTS, *_EIGHT, _POWERS_OF_TWO})


def cast(data: memoryview, source: str, target: str) -> tuple[bytearray, int]:
    """Return the elements of the dtype `source` as `target`, and how many finite ones became infinite.

    NaN stays NaN with its sign; both dtypes are of `CASTABLE`, `target` is one of `CASTS`.
    """
    cast_piece = _way(source, target)
    done, beyond = bytearray(len(data) * DTYPE_BITS[target] // DTYPE_BITS[source]), 0
    end = 0
    for piece in pieces(source, data):
        found = cast_piece(piece)
        begin, end = end, end + len(found)
        done[begin:end] = found
        beyond += _not_finite(found, target) - _not_finite(piece, source)
    return done, beyond


def _way(source: str, target: str) -> Callable[[memoryview], bytes | bytearray]:
    if (source, target) in _DIRECT:
        return _DIRECT[source, target]
    # Every one of its numbers is one of 32 bits, too, so that this rounds once.
    widen = _WIDE.get(source) or partial(_of_table, _tables(source))
    if target == "F32":
        return widen
    onward = _DIRECT["F32", target]
    return lambda data: onward(memoryview(widen(data)))


@lru_cache(maxsize=8)
def _ones(bits: int, count: int) -> int:
    """Return an integer with the lowest bit set in each of `count` elements."""
    return int.from_bytes((b"\x01" + bytes(bits // 8 - 1)) * count, "little")


def _not_finite(data: memoryview | bytes | bytearray, dtype: str) -> int:
    """Return how many elements are infinite or NaN."""
    if dtype not in _EXPONENTS:
        return sum(map(bytes(data).count, _odd_of_8(dtype)))
    bits, exponent = DTYPE_BITS[dtype], _EXPONENTS[dtype]
    ones = _ones(bits, len(data) * 8 // bits)
    # A one more carries into the bit of the sign where all bits of the exponent are set.
    carried = (int.from_bytes(data, "little") & ones * exponent) + ones * (exponent & -exponent)
    return (carried & ones << (bits - 1)).bit_count()


@cache
def _odd_of_8(dtype: str) -> bytes:
    """Return the bits of what is infinite or NaN."""
    return bytes(bits for bits in range(256) if not math.isfinite(_of_8(bits, dtype)))


def _to_bfloat16(data: memoryview) -> bytes:
    """Round elements of 32 bits to their upper halves."""
    ones = _ones(32, len(data) // 4)
    elements = int.from_bytes(data, "little")
    # The sign aside, what is larger than infinity is NaN, and then this carries into the bit of the sign.
    nans = ((elements & ones * 0x7FFFFFFF) + ones * 0x007FFFFF) >> 31 & ones
    rounding = ones * 0x7FFF + (elements >> 16 & ones)
    # NaN must not be rounded to infinity, nor carry into the next element: it becomes a quiet one.
    rounded = elements + (rounding & ~(nans * 0xFFFFFFFF)) | nans << 22
    return memoryview(rounded.to_bytes(len(data), "little")).cast("H")[1::2].tobytes()


def _to_float16(data: memoryview) -> bytes:
    return _packed_halves(data.cast("f").tolist())


def _double_to_float16(data: memoryview) -> bytes:
    return _packed_halves(data.cast("d").tolist())


def _packed_halves(numbers: Sequence[float]) -> bytes:
    form = f"<{len(numbers)}e"
    try:
        return struct.pack(form, *numbers)
    except OverflowError:
        return struct.pack(form, *map(_within_float16, numbers))


def _within_float16(number: float) -> float:
    return math.copysign(math.inf, number) if abs(number) >= _BEYOND_F16 else number


def _double_to_float(data: memoryview) -> bytes:
    return array("f", data.cast("d")).tobytes()


def _double_to_bfloat16(data: memoryview) -> bytes:
    """Round doubles once, though by way of 32 bits."""
    doubles, floats = data.cast("d"), array("f", data.cast("d"))
    bits = memoryview(floats).cast("B").cast("I")
    halves = memoryview(floats).cast("B").cast("H")[0::2].tolist()
    for at in (at for at, low in enumerate(halves) if low == 0x8000):
        # It may have become a tie only now: then it is moved back to the side that it came from.
        exact, near = abs(doubles[at]), abs(floats[at])
        bits[at] += (exact > near) - (exact < near)
    return _to_bfloat16(memoryview(floats).cast("B"))


def _to_double(data: memoryview) -> bytes:
    return array("d", data.cast("f")).tobytes()


def _of_bfloat16(data: memoryview) -> bytearray:
    wide = bytearray(len(data) * 2)
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return wide


def _of_float16(data: memoryview) -> bytes:
    return array("f", struct.unpack(f"<{len(data) // 2}e", data)).tobytes()


def _of_table(tables: tuple[bytes, ...], data: memoryview) -> bytearray:
    wide, found = bytearray(len(data) * 4), bytes(data)
    for at, table in enumerate(tables):
        wide[at::4] = found.translate(table)
    return wide


@cache
def _tables(dtype: str) -> tuple[bytes, ...]:
    """Return, for each of the four bytes of a number of 32 bits, what it is by the bits of 8."""
    numbers = struct.pack("<256f", *(_of_8(bits, dtype) for bits in range(256)))
    return tuple(numbers[at::4] for at in range(4))


def _of_8(bits: int, dtype: str) -> float:
    """Return the number that these 8 bits are."""
    if dtype == _POWERS_OF_TWO:
        return math.nan if bits == 0xFF else 2.0 ** (bits - 127)
    kind, size = _EIGHT[dtype], bits & 0x7F
    sign = -1.0 if bits & 0x80 else 1.0
    if bits == 0x80 and not kind.has_negative_zero:
        return math.nan
    if size in kind.nan:
        return math.copysign(math.nan, sign)
    if size == kind.infinite:
        return math.copysign(math.inf, sign)
    exponent, fraction = size >> kind.fraction, size & (1 << kind.fraction) - 1
    # The smallest exponent has no hidden one.
    significand = fraction + (1 << kind.fraction if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - kind.bias - kind.fraction)


_WIDE: Mapping[str, Callable[[memoryview], bytes | bytearray]] = {
    "BF16": _of_bfloat16,
    "F16": _of_float16,
}
_DIRECT: Mapping[tuple[str, str], Callable[[memoryview], bytes | bytearray]] = {
    **{(dtype, dtype): bytes for dtype in CASTS},
    ("F32", "BF16"): _to_bfloat16,
    ("F32", "F16"): _to_float16,
    ("F32", "F64"): _to_double,
    ("F64", "F32"): _double_to_float,
    ("F64", "BF16"): _double_to_bfloat16,
    ("F64", "F16"): _double_to_float16,
}
