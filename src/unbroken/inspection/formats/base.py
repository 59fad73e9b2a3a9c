"""What every format is read as: tensors by path, plain values, and what its checksums can prove."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from unbroken.checkpoint.finding import Finding
from unbroken.interchange.files import (
    HINT,
    PIECE_BYTES,
    RegularFile,
    damaged,
    encodable,
    unreadable,
)
from unbroken.state.tensors import ITEM_BYTES

__all__ = [
    "DTYPE_BITS",
    "HINT",
    "PIECE_BYTES",
    "CheckpointReader",
    "RegularFile",
    "SingleFileReader",
    "StoredTensor",
    "damaged",
    "encodable",
    "extent",
    "gather",
    "is_in_order",
    "row_major",
    "swapped",
    "tensor_bytes",
    "unreadable",
]

# The names of safetensors, with the bits of one element, and those that other formats have beside them.
DTYPE_BITS = {name: size * 8 for name, size in ITEM_BYTES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C32": 32,
    "C128": 128,
    "QI8": 8,
    "QU8": 8,
    "QI32": 32,
}
# Complex numbers are two of these each: what byte order is a matter of.
_SWAPPED_BYTES = {"C32": 2, "C64": 4, "C128": 8}
_MOST_DIMENSIONS = 64
_LARGEST_TENSOR_BYTES = 1 << 50
_CODES: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
# A view that shows its elements more than once may be of any size; no more than this is made of one.
_LARGEST_REPETITION_BYTES = 64 << 20
_MOST_COPIES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint: `where` is its file or the entry in it, `aliases` are further paths to it.

    `digest` is the one that the format carries, None if it carries none of single tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    where: str
    aliases: tuple[str, ...] = ()
    digest: str | None = None


class CheckpointReader(ABC):
    """An open checkpoint of some format. Nothing but headers has been read yet.

    `values` is everything that is no tensor, as plain data: dicts with string keys, lists, strings,
    numbers, booleans, None; in the place of a tensor stands `{"$tensor": path}`. `facts` is what the
    checkpoint says of itself. `problems` is what is missing or impossible, as far as headers tell.
    `checksums` says what bytes can be held against, None if the format carries nothing of the kind.
    `needs` is how to install what reads its tensors, None if nothing is missing.
    """

    format: str
    path: Path
    size_bytes: int
    files: dict[str, int]
    tensors: dict[str, StoredTensor]
    values: Any
    facts: dict[str, Any]
    problems: list[Finding]
    notes: list[str]
    checksums: str | None
    needs: str | None = None

    @abstractmethod
    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, row-major and little-endian. Raises DamagedError."""

    @abstractmethod
    def verify(self) -> Iterator[Finding]:
        """Read everything, and yield what is damaged beyond `problems`."""


class SingleFileReader(CheckpointReader):
    """One for a format that is a single file; what is in it is still to be entered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RegularFile(path)
        self.size_bytes = self._file.size_bytes
        self.files = {path.name: self.size_bytes}
        self.tensors = {}
        self.values = {}
        self.facts = {}
        self.problems = []
        self.notes = []


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a tensor, or None if no tensor is like that."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None or len(shape) > _MOST_DIMENSIONS:
        return None
    for length in shape:
        if type(length) is not int or not 0 <= length < _LARGEST_TENSOR_BYTES:
            return None
        bits *= length
    return None if bits % 8 or bits // 8 > _LARGEST_TENSOR_BYTES else bits // 8


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor whose elements lie in order."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of its storage a view spans, from its first to its last."""
    if 0 in shape:
        return 0
    count = 1
    for length, stride in zip(shape, strides, strict=True):
        count += (length - 1) * stride
    return count


def is_in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether the elements of a view lie row-major and without gaps."""
    expected = row_major(shape)
    return 0 in shape or all(
        length == 1 or stride == wanted
        for length, stride, wanted in zip(shape, strides, expected, strict=True)
    )


def gather(data: memoryview, item: int, shape: Sequence[int], strides: Sequence[int]) -> bytearray:
    """Return the elements of a view, of `item` bytes each, row-major; `data` begins at its first."""
    total = math.prod(shape) * item
    if total > max(len(data), _LARGEST_REPETITION_BYTES):
        raise unreadable("a view", f"{total} bytes that repeat {len(data)} are not written out")
    target = bytearray(total)
    shape, strides = _merged(shape, strides)
    if not shape or not total:
        target[:] = data[:total]
        return target
    if total > len(data) and math.prod(shape) // max(shape) > _MOST_COPIES:
        raise unreadable("a view", f"{len(shape)} dimensions that repeat one another are not written out")
    unit = min(item, 8)
    source, into, code = data.cast(_CODES[unit]), memoryview(target).cast(_CODES[unit]), _CODES[unit]
    lanes = item // unit
    ordered = row_major(shape)
    # Along the longest dimension, which strided slices of memory copy at once.
    longest = max(range(len(shape)), key=shape.__getitem__)
    count, step, jump = shape[longest], strides[longest] * lanes, ordered[longest] * lanes
    others = [index for index in range(len(shape)) if index != longest]
    for place in product(*(range(shape[index]) for index in others)):
        start = sum(at * strides[index] for at, index in zip(place, others, strict=True)) * lanes
        first = sum(at * ordered[index] for at, index in zip(place, others, strict=True)) * lanes
        for lane in range(lanes):
            row = source[start + lane : start + lane + (count - 1) * step + 1 : step or 1]
            if not step:
                row = memoryview(row.tobytes() * count).cast("B").cast(code)
            into[first + lane : first + lane + (count - 1) * jump + 1 : jump] = row
    return target


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the same view with as few dimensions as it takes."""
    lengths: list[int] = []
    steps: list[int] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if steps and steps[-1] == stride * length:
            lengths[-1], steps[-1] = lengths[-1] * length, stride
        else:
            lengths.append(length)
            steps.append(stride)
    return lengths, steps


def swapped(data: bytearray, dtype: str) -> bytearray:
    """Return elements with the bytes of each in the other order."""
    item = _SWAPPED_BYTES.get(dtype, DTYPE_BITS[dtype] // 8)
    code = _CODES[item]
    if item == 1:
        return data
    elements = array(code, bytes(data))
    elements.byteswap()
    return bytearray(elements.tobytes())
