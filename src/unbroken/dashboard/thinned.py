"""A curve of any length in bounded memory, with its peaks and its pits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

Point: TypeAlias = tuple[int, float]


class _Bucket:
    """Neighbouring points: the lowest and the highest, the sum of all, the first that is not finite."""

    __slots__ = ("bad_step", "count", "high", "high_step", "index", "low", "low_step", "total")

    def __init__(self, index: int) -> None:
        self.index = index
        self.low, self.high = math.inf, -math.inf
        self.low_step = self.high_step = 0
        self.total = 0.0
        self.count = 0
        self.bad_step: int | None = None

    def merge(self, later: _Bucket) -> None:
        if later.low < self.low:
            self.low, self.low_step = later.low, later.low_step
        if later.high > self.high:
            self.high, self.high_step = later.high, later.high_step
        self.total += later.total
        self.count += later.count
        if self.bad_step is None:
            self.bad_step = later.bad_step


class Thinned:
    """Takes points of increasing steps, and keeps at most two for each of `capacity` equal spans of steps."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._width = 1
        self._buckets: list[_Bucket] = []

    def add(self, step: int, value: float) -> None:
        """Add a point; one that is not finite is kept apart."""
        index = step // self._width
        if not self._buckets or self._buckets[-1].index != index:
            self._buckets.append(_Bucket(index))
            if len(self._buckets) > self._capacity:
                self._halve()
        bucket = self._buckets[-1]
        if -math.inf < value < math.inf:
            bucket.total += value
            bucket.count += 1
            if value < bucket.low:
                bucket.low, bucket.low_step = value, step
            if value > bucket.high:
                bucket.high, bucket.high_step = value, step
        elif bucket.bad_step is None:
            bucket.bad_step = step

    def coarser(self, capacity: int) -> Thinned:
        """Return the same curve in at most `capacity` spans."""
        found = Thinned(capacity)
        found._width = self._width
        for bucket in self._buckets:
            copy = _Bucket(bucket.index)
            copy.merge(bucket)
            found._buckets.append(copy)
        found._halve()
        return found

    def lines(self) -> Iterator[list[Point]]:
        """Yield the pieces of the curve, each without a gap; a value that is not finite makes one."""
        piece: list[Point] = []
        for bucket in self._buckets:
            if bucket.low <= bucket.high:
                piece += sorted({(bucket.low_step, bucket.low), (bucket.high_step, bucket.high)})
            # In a wide bucket the others are around it.
            if bucket.bad_step is not None and self._width == 1 and piece:
                yield piece
                piece = []
        if piece:
            yield piece

    def means(self) -> list[Point]:
        """Return the mean of each span in its middle; none if nothing was thinned out."""
        if self._width == 1:
            return []
        middle = self._width // 2
        return [
            (bucket.index * self._width + middle, bucket.total / bucket.count)
            for bucket in self._buckets
            if bucket.count
        ]

    def low(self) -> Point | None:
        """Return the lowest point of all, the first of several; None without one that is finite."""
        found = [bucket for bucket in self._buckets if bucket.low <= bucket.high]
        best = min(found, key=lambda bucket: bucket.low, default=None)
        return (best.low_step, best.low) if best is not None else None

    def high(self) -> Point | None:
        """Return the highest point of all, the first of several; None without one that is finite."""
        found = [bucket for bucket in self._buckets if bucket.low <= bucket.high]
        best = max(found, key=lambda bucket: bucket.high, default=None)
        return (best.high_step, best.high) if best is not None else None

    def not_finite(self) -> list[int]:
        """Return the steps of values that were not finite, at most one for each span."""
        return [bucket.bad_step for bucket in self._buckets if bucket.bad_step is not None]

    def _halve(self) -> None:
        merged: list[_Bucket] = []
        while len(self._buckets) > self._capacity:
            self._width *= 2
            merged = []
            for bucket in self._buckets:
                bucket.index //= 2
                if merged and merged[-1].index == bucket.index:
                    merged[-1].merge(bucket)
                else:
                    merged.append(bucket)
            self._buckets = merged
