"""How far two tensors are apart, element by element, without a library for numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, sub
from typing import TypeAlias

from unbroken.inspection.formats.base import DTYPE_BITS

_ELEMENTS_AT_ONCE = 1 << 16
_BYTES_AT_ONCE = 1 << 20
Numbers: TypeAlias = Sequence[float] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """`equal` counts elements of the same bits, or of the same value if the dtypes differ.

    `largest` is the largest absolute difference, None for kinds of elements that are not read as
    numbers; an infinity beside a number is infinitely far. NaN has no distance to anything: `nans`
    counts those in A and in B.
    """

    elements: int
    equal: int
    equal_fraction: float
    largest: float | int | None
    nans: tuple[int, int]


def same_bytes(first: memoryview, second: memoryview) -> bool:
    """Tell whether two pieces of memory hold the same bytes."""
    # Views are compared element by element; bytes, all at once, ten times as fast with the copy.
    return len(first) == len(second) and all(
        bytes(first[start : start + _BYTES_AT_ONCE]) == bytes(second[start : start + _BYTES_AT_ONCE])
        for start in range(0, len(first), _BYTES_AT_ONCE)
    )


def closeness(dtypes: tuple[str, str], first: memoryview, second: memoryview) -> Closeness:
    """Compare two tensors with the same number of elements; `dtypes` are theirs."""
    readers = READERS.get(dtypes[0]), READERS.get(dtypes[1])
    elements = len(first) * 8 // DTYPE_BITS[dtypes[0]]
    equal, largest, nans = 0, None, (0, 0)
    for one, other in zip(pieces(dtypes[0], first), pieces(dtypes[1], second), strict=True):
        if dtypes[0] == dtypes[1]:
            equal += _same_bits(one, other, DTYPE_BITS[dtypes[0]])
        if readers[0] is None or readers[1] is None:
            continue
        numbers = readers[0](one), readers[1](other)
        if dtypes[0] != dtypes[1]:
            equal += sum(map(eq, *numbers))
        furthest, found = _distance(*numbers)
        largest = furthest if largest is None else max(largest, furthest)
        nans = (nans[0] + found[0], nans[1] + found[1])
    return Closeness(
        elements=elements,
        equal=equal,
        equal_fraction=equal / elements if elements else 1.0,
        largest=largest,
        nans=nans,
    )


def pieces(dtype: str, data: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, some elements at a time."""
    # As many elements in each, so that the pieces of two dtypes go together.
    size = _ELEMENTS_AT_ONCE * DTYPE_BITS[dtype] // 8
    return (data[start : start + size] for start in range(0, len(data), size))


def _same_bits(first: memoryview, second: memoryview, bits: int) -> int:
    if same_bytes(first, second):
        return len(first) * 8 // bits
    if bits not in (8, 16, 32, 64, 128):
        return 0
    if bits == 128:
        halves = [data.cast("Q") for data in (first, second)]
        low, high = ([*map(eq, halves[0][at::2], halves[1][at::2])] for at in (0, 1))
        return sum(one and other for one, other in zip(low, high, strict=True))
    form = _FORMS[bits]
    return sum(map(eq, first.cast(form), second.cast(form)))  # type: ignore[call-overload]


def _distance(first: Numbers, second: Numbers) -> tuple[float | int, tuple[int, int]]:
    """Return the largest absolute difference, and how many NaN there are in each."""
    apart = [abs(distance) for distance in map(sub, first, second)]
    largest, total = max(apart), sum(apart)
    if math.isfinite(total):
        return largest, (0, 0)
    nans = sum(map(math.isnan, first)), sum(map(math.isnan, second))
    known = [
        # The same infinity twice is no distance, though its difference is no number.
        0.0 if one == other else abs(one - other)
        for one, other in zip(first, second, strict=True)
        if not math.isnan(one) and not math.isnan(other)
    ]
    return max(known, default=0.0), nans


def _bfloat16(data: memoryview) -> Numbers:
    wide = bytearray(len(data) * 2)
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return memoryview(wide).cast("f")


def _float16(data: memoryview) -> Numbers:
    return struct.unpack(f"<{len(data) // 2}e", data)


_FORMS = {8: "B", 16: "H", 32: "I", 64: "Q"}
# How the elements of a kind are read as numbers.
READERS: Mapping[str, Callable[[memoryview], Numbers]] = {
    "F64": lambda data: data.cast("d"),
    "F32": lambda data: data.cast("f"),
    "F16": _float16,
    "BF16": _bfloat16,
    "I64": lambda data: data.cast("q"),
    "I32": lambda data: data.cast("i"),
    "I16": lambda data: data.cast("h"),
    "I8": lambda data: data.cast("b"),
    "U64": lambda data: data.cast("Q"),
    "U32": lambda data: data.cast("I"),
    "U16": lambda data: data.cast("H"),
    "U8": lambda data: data.cast("B"),
    "BOOL": lambda data: data.cast("B"),
}
