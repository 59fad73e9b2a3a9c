"""The table of events, one line at a time, as they happen."""

from __future__ import annotations

from collections.abc import Iterable

from disasters import Event

_HEADER = ("", "event", "at step", "resumed from", "repeated", "")
_WIDTHS = (2, 25, 8, 16, 8, 0)
_RIGHT = (0, 2, 4)


def header() -> str:
    """Return the line above the events."""
    return _line(_HEADER)


def row(number: int, event: Event) -> str:
    """Return the line of one event."""
    return _line(cells(number, event))


def cells(number: int, event: Event) -> tuple[str, ...]:
    """Return the columns of one event as text."""
    return (
        str(number),
        event.name,
        f"{event.at_step:,}",
        event.resumed_from,
        f"{event.repeated_steps:,}",
        event.seen,
    )


def steps_done_again(events: Iterable[Event]) -> int:
    """Return how often a step was done that had been done before."""
    return sum(event.repeated_steps for event in events)


def _line(texts: tuple[str, ...]) -> str:
    padded = (
        text.rjust(width) if column in _RIGHT else text.ljust(width)
        for column, (text, width) in enumerate(zip(texts, _WIDTHS, strict=True))
    )
    return "  ".join(padded).rstrip()
