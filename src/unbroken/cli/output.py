"""Where words go: data to stdout, everything else to stderr, colour only for a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import click

from unbroken.dashboard.words import size as size  # noqa: PLC0414 - commands know it by this place

_BLANK = "-"


def data(text: str) -> None:
    """Print one line of what was asked for."""
    print(text)


def data_json(value: Any) -> None:
    """Print `value` as one line of JSON, with what JSON lacks as the strings "nan", "inf" and "-inf"."""
    # Loaded here: most calls print none.
    from unbroken.rundir.journal import finite

    print(json.dumps(finite(value), ensure_ascii=False, allow_nan=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` in columns under `header`; an empty cell shows as "-"."""
    # By columns, and printed at once: a checkpoint may have very many tensors.
    columns = [_padded(column) for column in zip(*[header, *rows], strict=True)]
    data("\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True)))


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [(cell or _BLANK).ljust(width) for cell in column]


def note(text: str) -> None:
    """Say something about what is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)


def error(message: str, *, hint: str) -> None:
    """Say what went wrong and what to do next, on stderr."""
    note(f"{painted('error:', 'red', sys.stderr)} {message}\n\nhint: {hint}")


def painted(text: str, colour: str, stream: TextIO) -> str:
    """Return `text` in `colour` if `stream` is a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return click.style(text, fg=colour)


def duration(seconds: float) -> str:
    """Return a length of time for people, in its two largest units.

    >>> duration(0.25), duration(75), duration(7322)
    ('0.2s', '1m15s', '2h02m')
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics for people: floats in six digits, integers in all of theirs."""
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
