"""What the numbers of a tensor are like: their range and mean, and those that are no numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unbroken.inspection.closeness import READERS, Numbers, pieces
from unbroken.inspection.formats.base import CheckpointReader

_BINS = 32
# Below this a number has fewer digits than its kind could hold.
_LEAST_NORMAL = {"F64": 2.0**-1022, "F32": 2.0**-126, "BF16": 2.0**-126, "F16": 2.0**-14}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """`least`, `largest` and `mean` are of what is finite, None if nothing is.

    `denormals` are so small that they have lost digits; of integers there are none.
    """

    elements: int
    least: float | int | None
    largest: float | int | None
    mean: float | None
    zeros: int
    denormals: int
    nans: int
    infinities: int


def statistics(reader: CheckpointReader, path: str) -> Statistics | None:
    """Read a tensor and return what its numbers are like, None for kinds that are not read as numbers.

    Raises DamagedError, StorageError.
    """
    dtype = reader.tensors[path].dtype
    return _statistics(dtype, reader.read(path)) if dtype in READERS else None


def with_histogram(reader: CheckpointReader, path: str) -> tuple[Statistics | None, tuple[int, ...] | None]:
    """Return the same, and how many numbers there are in each of 32 bins from the least to the largest.

    Bins are equally wide, and of what is finite; there are none if that is all the same number. The tensor is
    read once. Raises DamagedError, StorageError.
    """
    dtype = reader.tensors[path].dtype
    if dtype not in READERS:
        return None, None
    data = reader.read(path)
    found = _statistics(dtype, data)
    return found, _histogram(dtype, data, found)


def _histogram(dtype: str, data: memoryview, found: Statistics) -> tuple[int, ...] | None:
    least, largest = found.least, found.largest
    if least is None or largest is None or least == largest:
        return None
    counts: Counter[int] = Counter()
    has_others = bool(found.nans or found.infinities)
    for piece in pieces(dtype, data):
        numbers = READERS[dtype](piece)
        counts.update(_bins(filter(math.isfinite, numbers) if has_others else numbers, least, largest))
    # The largest number itself belongs to the last bin.
    counts[_BINS - 1] += counts[_BINS]
    return tuple(counts[index] for index in range(_BINS))


def _bins(
    numbers: Iterable[float] | Iterable[int], least: float | int, largest: float | int
) -> Iterator[int]:
    """Return the number of the bin of each, and the one after the last of the largest."""
    if isinstance(least, int) and isinstance(largest, int):
        whole = largest - least
        return ((number - least) * _BINS // whole for number in numbers)  # type: ignore[misc]
    span = largest - least
    if math.isinf(span):
        # Of numbers so far apart, the halves are not.
        half, span = least / 2, largest / 2 - least / 2
        return (int((number / 2 - half) / span * _BINS) for number in numbers)
    return (int((number - least) / span * _BINS) for number in numbers)


def _statistics(dtype: str, data: memoryview) -> Statistics:
    read, least = READERS[dtype], _LEAST_NORMAL.get(dtype, 0.0)
    found = [_of_piece(read(piece), least) for piece in pieces(dtype, data)]
    count = sum(one.count for one in found)
    totals = [one.total for one in found]
    mean = math.fsum(totals) / count if count and all(map(math.isfinite, totals)) else None
    return Statistics(
        elements=sum(one.elements for one in found),
        least=min((one.least for one in found if one.least is not None), default=None),
        largest=max((one.largest for one in found if one.largest is not None), default=None),
        mean=mean,
        zeros=sum(one.zeros for one in found),
        denormals=sum(one.denormals for one in found),
        nans=sum(one.nans for one in found),
        infinities=sum(one.elements - one.count - one.nans for one in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """`count` and `total` are of what is finite."""

    elements: int
    count: int
    total: float | int
    least: float | int | None
    largest: float | int | None
    zeros: int
    denormals: int
    nans: int


def _of_piece(numbers: Numbers, least_normal: float) -> _Piece:
    values = list(numbers)
    elements, nans, total = len(values), 0, sum(values)
    # One that is not finite makes the sum so; the other way round very large numbers may do it.
    if not isinstance(total, int) and not math.isfinite(total):
        nans = sum(map(math.isnan, values))
        values = list(filter(math.isfinite, values))
        total = sum(values)
    small = [value for value in values if -least_normal < value < least_normal] if least_normal else []
    zeros = small.count(0) if least_normal else values.count(0)
    return _Piece(
        elements=elements,
        count=len(values),
        total=total,
        least=min(values, default=None),
        largest=max(values, default=None),
        zeros=zeros,
        denormals=len(small) - zeros if least_normal else 0,
        nans=nans,
    )
