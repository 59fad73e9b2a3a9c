"""Tensors that are cut into blocks: whether these tile them, and how they are put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from unbroken.inspection.formats.base import DTYPE_BITS, row_major

# Pieces that lie side by side are compared with few others, those of no order with very many.
_MOST_COMPARISONS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something lies: a range of a file. `transforms` are what its bytes went through."""

    file: str
    start: int
    size_bytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a tensor: from `offsets` on, `sizes` long. `place` is None if none is named."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """A tensor that lies in pieces."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    pieces: tuple[Piece, ...]


class Tiling:
    """Finds pieces that do not tile their tensor, with as many comparisons for a whole checkpoint."""

    def __init__(self) -> None:
        self._left = _MOST_COMPARISONS

    def problem(self, shape: Sequence[int], pieces: Sequence[Piece]) -> str | None:
        """Return what is wrong with the pieces of a tensor, None if they tile it."""
        for piece in pieces:
            if any(at + size > length for at, size, length in _zipped(piece, shape)):
                return f"its piece at {_words(piece.offsets)} reaches beyond {_words(shape)}"
        solid = [piece for piece in pieces if 0 not in piece.sizes]
        overlap = self._overlap(solid)
        if overlap is not None:
            return overlap
        total, found = math.prod(shape), sum(math.prod(piece.sizes) for piece in solid)
        return f"{total - found} of its {total} elements are in no piece" if total != found else None

    def _overlap(self, pieces: Sequence[Piece]) -> str | None:
        dimensions = range(len(pieces[0].sizes)) if len(pieces) > 1 else ()
        # Along the dimension that most of them are cut in, few lie side by side.
        along = max(dimensions, key=lambda at: len({piece.offsets[at] for piece in pieces}), default=None)
        if along is None:
            return "it is there twice" if len(pieces) > 1 else None
        beside: list[Piece] = []
        for piece in sorted(pieces, key=lambda piece: piece.offsets[along]):
            beside = [one for one in beside if one.offsets[along] + one.sizes[along] > piece.offsets[along]]
            self._left -= len(beside) + 1
            if self._left < 0:
                return "too many of its pieces lie across each other to be compared"
            for other in beside:
                if all(
                    one < at + size and at < one + length
                    for one, length, at, size in zip(
                        other.offsets, other.sizes, piece.offsets, piece.sizes, strict=True
                    )
                ):
                    return f"its pieces at {_words(other.offsets)} and {_words(piece.offsets)} overlap"
            beside.append(piece)
        return None


def _zipped(piece: Piece, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(piece.offsets, piece.sizes, shape, strict=True)


def _words(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def paste(target: bytearray, tensor: CutTensor, piece: Piece, data: memoryview) -> None:
    """Put the elements of a piece where they belong in the whole tensor."""
    item = DTYPE_BITS[tensor.dtype] // 8
    strides = row_major(tensor.shape)
    # From here on the piece is as wide as the tensor, so that its elements lie there in one row.
    wide = len(tensor.shape)
    while wide and piece.sizes[wide - 1] == tensor.shape[wide - 1]:
        wide -= 1
    outer = max(wide - 1, 0)
    run = math.prod(piece.sizes[outer:]) * item
    first = sum(at * stride for at, stride in zip(piece.offsets, strides, strict=True))
    for index, place in enumerate(product(*(range(size) for size in piece.sizes[:outer]))):
        start = (first + sum(at * stride for at, stride in zip(place, strides, strict=False))) * item
        target[start : start + run] = data[index * run : (index + 1) * run]
