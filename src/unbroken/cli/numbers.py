"""How the numbers of tensors are shown: for `unbroken inspect --values`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unbroken.cli import output
from unbroken.cli.values import printable
from unbroken.inspection.detect import CheckpointReader
from unbroken.inspection.statistics import statistics, with_histogram

_HEADER = ("TENSOR", "LEAST", "LARGEST", "MEAN", "ZEROS", "DENORMALS", "NAN", "INF")
# A page with a histogram of each of very many tensors is too large for browsers.
_MOST_HISTOGRAMS, _LARGEST_ONES = 2_000, 200
_COUNTED = ("zeros", "denormals", "nans", "infinities")


def add(reader: CheckpointReader, rows: Sequence[dict[str, Any]]) -> None:
    """Read every tensor and add what its numbers are like to its row. Raises DamagedError."""
    for row in rows:
        found = statistics(reader, row["path"])
        row["numbers"] = None if found is None else asdict(found)


def add_with_histograms(reader: CheckpointReader, rows: Sequence[dict[str, Any]]) -> None:
    """Do the same, and add `histogram`: to all rows, or of very many to those of the largest tensors."""
    pictured = rows
    if len(rows) > _MOST_HISTOGRAMS:
        pictured = sorted(rows, key=lambda row: -row["size_bytes"])[:_LARGEST_ONES]
    for row in pictured:
        found, row["histogram"] = with_histogram(reader, row["path"])
        row["numbers"] = None if found is None else asdict(found)
    add(reader, [row for row in rows if "histogram" not in row])


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print what has been added to the rows."""
    output.data("")
    output.table(_HEADER, [_line(row["path"], row["numbers"]) for row in rows])
    bad = [row for row in rows if row["numbers"] and (row["numbers"]["nans"] or row["numbers"]["infinities"])]
    if bad:
        words = output.painted(f"{len(bad)} of {len(rows)} tensors are not finite", "red", sys.stdout)
        output.data(f"{words}, {printable(bad[0]['path'])} for one")


def _line(path: str, numbers: dict[str, Any] | None) -> tuple[str, ...]:
    if numbers is None:
        return (printable(path), *["-"] * (len(_HEADER) - 1))
    range_ = [_in_words(numbers[key]) for key in ("least", "largest", "mean")]
    return (printable(path), *range_, *(str(numbers[key] or "-") for key in _COUNTED))


def _in_words(number: float | int | None) -> str:
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"
