"""Numbers that training cannot go on from, or should not: what `unbroken doctor --values` looks for."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.errors import StorageError
from unbroken.inspection.doctor import Advice
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.inspection.statistics import Statistics, statistics

_FEW = 3
# Fewer zeros in a row are a bias or a count, and more than so many denormals are no coincidence.
_FEWEST_ELEMENTS = 16
_FRACTION = 0.01
# From half of what float16 holds the next steps may overflow.
_LARGE_IN_FLOAT16 = 32_752.0


def advise_on_values(reader: CheckpointReader) -> list[Advice]:
    """Read every tensor that can be read, and return what is to be known of their numbers.

    Raises DamagedError.
    """
    found, unread = dict[str, Statistics](), dict[str, str]()
    for path in reader.tensors:
        try:
            one = statistics(reader, path)
        except StorageError as error:
            unread[path] = error.message
        else:
            found |= {} if one is None else {path: one}
    return [*_of(found, reader), *_of_unread(unread)]


def _of_unread(unread: dict[str, str]) -> Iterator[Advice]:
    if unread:
        yield Advice(
            severity="note",
            text=f"the numbers of {len(unread)} tensors could not be read",
            evidence=_names([*unread.values()]),
            remedy="nothing is said of these",
        )


def _of(found: dict[str, Statistics], reader: CheckpointReader) -> Iterator[Advice]:
    bad = [path for path, one in found.items() if one.nans or one.infinities]
    if bad:
        yield Advice(
            severity="error",
            text="it holds numbers that are not finite",
            evidence=", ".join(
                f"{path}: {found[path].nans} NaN, {found[path].infinities} infinite" for path in bad[:_FEW]
            ),
            remedy="take an older one: training that goes on from it stays so",
        )
    large = [path for path, one in found.items() if _is_large(reader.tensors[path].dtype, one)]
    if large:
        yield Advice(
            severity="warning",
            text="numbers in float16 are near the largest that it holds",
            evidence=", ".join(
                f"{path}: {found[path].least:g} to {found[path].largest:g}" for path in large[:_FEW]
            ),
            remedy="train in bfloat16, or keep these in float32",
        )
    empty = [path for path, one in found.items() if one.zeros == one.elements >= _FEWEST_ELEMENTS]
    if empty:
        yield Advice(
            severity="note",
            text=f"{len(empty)} of {len(found)} tensors hold nothing but zeros",
            evidence=_names(empty),
            remedy="right for biases and for moments before the first step; others were never written",
        )
    small = [path for path, one in found.items() if one.denormals > _FRACTION * one.elements]
    if small:
        yield Advice(
            severity="note",
            text=f"{len(small)} of {len(found)} tensors have more than 1 % of numbers that lost digits",
            evidence=_names(small),
            remedy="processors flush these to zero or are slow with them; in moments they do little harm",
        )


def _is_large(dtype: str, one: Statistics) -> bool:
    return dtype == "F16" and max(abs(one.least or 0), abs(one.largest or 0)) > _LARGE_IN_FLOAT16


def _names(paths: list[str]) -> str:
    more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
    return ", ".join(paths[:_FEW]) + more
