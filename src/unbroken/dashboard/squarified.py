"""Rectangles whose areas are given, side by side in a larger one, and as near to squares as that goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle: its corner at the top left, its width and its height."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Return a box for each size, in their order, with areas in proportion to them; together they fill `box`.

    Sizes are above 0; from the largest to the smallest the boxes are nearest to squares.
    """
    # Bruls, Huizing, van Wijk: Squarified Treemaps, 2000. A row along the shorter side takes sizes as long
    # as that makes the longest of its boxes less long.
    found: list[Box] = []
    left, first = box, 0
    scale = box.width * box.height / sum(sizes) if sizes else 0.0
    while first < len(sizes):
        side = min(left.width, left.height)
        end, area = _row(sizes, first, side, scale)
        row, left = _placed([size * scale for size in sizes[first:end]], area, left)
        found += row
        first = end
    return found


def _row(sizes: Sequence[float], first: int, side: float, scale: float) -> tuple[int, float]:
    """Return where the row that begins with size `first` ends, and its area."""
    area = least = largest = sizes[first] * scale
    worst = _worst(area, least, largest, side)
    for index in range(first + 1, len(sizes)):
        size = sizes[index] * scale
        longer = area + size, min(least, size), max(largest, size)
        next_worst = _worst(*longer, side)
        if next_worst > worst:
            return index, area
        (area, least, largest), worst = longer, next_worst
    return len(sizes), area


def _worst(area: float, least: float, largest: float, side: float) -> float:
    """Return how many times as long as wide the longest box of a row is."""
    squares = side * side / (area * area) if area else 0.0
    return max(squares * largest, 1 / (squares * least) if squares * least else float("inf"))


def _placed(areas: Sequence[float], area: float, box: Box) -> tuple[list[Box], Box]:
    """Return the boxes of a row along the shorter side of `box`, and what is left of it."""
    found, at = [], 0.0
    is_wide = box.width >= box.height
    side = min(box.width, box.height)
    thickness = area / side if side else 0.0
    for one in areas:
        length = one / thickness if thickness else 0.0
        if is_wide:
            found.append(Box(box.x, box.y + at, thickness, length))
        else:
            found.append(Box(box.x + at, box.y, length, thickness))
        at += length
    if is_wide:
        return found, Box(box.x + thickness, box.y, max(0.0, box.width - thickness), box.height)
    return found, Box(box.x, box.y + thickness, box.width, max(0.0, box.height - thickness))
