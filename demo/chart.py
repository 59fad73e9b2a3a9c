"""Drawing in SVG: elements, axes, ticks. No dependency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

INK = "#1f2937"
QUIET = "#6b7280"
GRID = "#e5e7eb"


def element(tag: str, *content: str, **attributes: object) -> str:
    """Return one element; `content` is markup, attribute names have "_" for "-" and none at their end.

    >>> element("line", x1=1, stroke_width=2)
    '<line x1="1" stroke-width="2"/>'
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
    )
    inside = "".join(content)
    return f"<{tag}{named}>{inside}</{tag}>" if inside else f"<{tag}{named}/>"


def text(words: str, x: float, y: float, **attributes: object) -> str:
    """Return `words` at a point; they are escaped."""
    return element("text", escape(words), **{"x": x, "y": y, "fill": INK, "font_size": 13, **attributes})


def curve(points: Iterable[Point], **attributes: object) -> str:
    """Return a line through `points`."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=path, fill="none", stroke_linejoin="round", **attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of `value`."""
        low, high, here = (self._measure(number) for number in (self.low, self.high, value))
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round values within the axis."""
        if self.is_logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        else:
            rough = (self.high - self.low) / count
            power = 10.0 ** math.floor(math.log10(rough))
            width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
            first = math.ceil(self.low / width)
            values = [index * width for index in range(first, math.floor(self.high / width) + 1)]
        return [value for value in values if self.low <= value <= self.high]

    def _measure(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value


def value_axis(values: Sequence[float], *, start: float, end: float) -> Axis:
    """Return an axis for `values` with a little air, logarithmic if they span more than a factor of 8."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 8:
        return Axis(low=low / 1.2, high=high * 1.2, start=start, end=end, is_logarithmic=True)
    air = (high - low) * 0.06 or 1.0
    return Axis(low=low - air, high=high + air, start=start, end=end)


def rows_without_overlap(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each span, from left to right, the first row in which it meets no earlier one.

    >>> rows_without_overlap([(0, 10), (5, 15), (12, 20)])
    [0, 1, 0]
    """
    ends: list[float] = []
    rows = []
    for start, end in spans:
        row = next((row for row, taken in enumerate(ends) if taken <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def label(value: float) -> str:
    """Return a tick's value as people write it.

    >>> label(2000.0), label(0.05)
    ('2,000', '0.05')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
