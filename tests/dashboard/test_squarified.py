"""Areas as rectangles side by side: nothing is lost, nothing overlaps, and squares are what is aimed at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.dashboard.squarified import Box, squarified

SIZES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40).map(lambda sizes: sorted(sizes, reverse=True))


def overlap(one: Box, other: Box) -> float:
    width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    height = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return max(0.0, width) * max(0.0, height)


@given(sizes=SIZES, width=st.floats(1, 1000), height=st.floats(1, 1000))
@settings(max_examples=60, deadline=None, database=None)
def test_boxes_have_the_areas_that_were_asked_for_and_fill_the_whole_without_overlap(
    sizes: list[float], width: float, height: float
) -> None:
    whole = Box(2.0, 3.0, width, height)
    boxes = squarified(sizes, whole)
    scale = width * height / sum(sizes)
    assert [box.width * box.height for box in boxes] == pytest.approx(
        [size * scale for size in sizes], rel=1e-6, abs=1e-9 * width * height
    )
    slack = 1e-6 * max(width, height)
    for index, box in enumerate(boxes):
        assert box.x >= whole.x - slack
        assert box.y >= whole.y - slack
        assert box.x + box.width <= whole.x + width + slack
        assert box.y + box.height <= whole.y + height + slack
        assert all(overlap(box, other) <= slack * max(width, height) for other in boxes[:index])


def test_the_example_of_the_paper_is_laid_out_as_in_the_paper() -> None:
    boxes = squarified([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert boxes[:2] == [Box(0, 0, 3, 2), Box(0, 2, 3, 2)]
    assert boxes[2] == pytest.approx(Box(3, 0, 12 / 7, 7 / 3))
    assert boxes[3] == pytest.approx(Box(3 + 12 / 7, 0, 9 / 7, 7 / 3))
    assert boxes[4] == pytest.approx(Box(3, 7 / 3, 1.2, 5 / 3))


def test_equal_sizes_in_a_square_are_squares() -> None:
    assert {(box.width, box.height) for box in squarified([1] * 4, Box(0, 0, 2, 2))} == {(1.0, 1.0)}
    assert squarified([], Box(0, 0, 2, 2)) == []
