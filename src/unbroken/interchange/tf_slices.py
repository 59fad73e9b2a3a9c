"""A tensor that is kept in pieces, put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

from unbroken.interchange.files import damaged, unreadable
from unbroken.interchange.tf_entries import BundleEntry, Extent, slice_shape

# A tensor that is cut as a grid has as many cells as pieces.
_MOST_CELLS_A_PIECE = 64


def put_together(
    entry: BundleEntry, read: Callable[[tuple[Extent, ...]], bytearray], where: str
) -> bytearray:
    """Return the bytes of a tensor. Raises DamagedError unless its pieces fill it, each element once."""
    check_tiling(entry, where)
    item = entry.element.item_bytes or 0
    target = bytearray(entry.size_bytes)
    for extents in entry.slices:
        piece = slice_shape(extents, entry.shape)
        if 0 not in piece:
            _copy(memoryview(read(extents)), target, (entry.shape, piece, extents), item)
    return target


def check_tiling(entry: BundleEntry, where: str) -> None:
    """Raise DamagedError unless the pieces of a tensor fill it, each element once."""
    pieces = [extents for extents in entry.slices if 0 not in slice_shape(extents, entry.shape)]
    cuts = [_cuts(pieces, axis, size) for axis, size in enumerate(entry.shape)]
    cells = math.prod(max(len(places) - 1, 0) for places in cuts)
    if cells > _MOST_CELLS_A_PIECE * max(len(pieces), 1):
        raise unreadable(where, f"{len(pieces)} pieces that form no grid are not put together")
    taken: set[tuple[int, ...]] = set()
    for extents in pieces:
        ranges = [
            _cells(*extent, size, places)
            for extent, size, places in zip(extents, entry.shape, cuts, strict=True)
        ]
        count, more = len(taken), math.prod(map(len, ranges))
        taken.update(product(*ranges))
        if len(taken) != count + more:
            raise damaged(where, "pieces that do not overlap", f"one at {extents} that does")
    if len(taken) != cells:
        raise damaged(where, f"pieces that fill {entry.shape}", f"{len(pieces)} that leave gaps")


def _cuts(pieces: list[tuple[Extent, ...]], axis: int, size: int) -> dict[int, int]:
    """Return where a dimension is cut, each with its number in order."""
    found = {0, size}
    for extents in pieces:
        start, length = extents[axis]
        found |= {start, start + (size if length is None else length)}
    return {place: number for number, place in enumerate(sorted(found))}


def _cells(start: int, length: int | None, size: int, places: dict[int, int]) -> range:
    return range(places[start], places[start + (size if length is None else length)])


def _copy(
    piece: memoryview,
    target: bytearray,
    place: tuple[tuple[int, ...], tuple[int, ...], tuple[Extent, ...]],
    item: int,
) -> None:
    whole, shape, extents = place
    # As many of the last dimensions as the piece has in full, and one more, lie in a row.
    row = len(shape)
    while row > 0 and shape[row - 1] == whole[row - 1]:
        row -= 1
    row = max(row - 1, 0)
    size = math.prod(shape[row:]) * item
    steps = [math.prod(whole[axis + 1 :]) * item for axis in range(len(whole))]
    first = sum(start * step for (start, _), step in zip(extents, steps, strict=True))
    done = 0
    for at in product(*map(range, shape[:row])):
        start = first + sum(index * step for index, step in zip(at, steps[:row], strict=True))
        target[start : start + size] = piece[done : done + size]
        done += size
