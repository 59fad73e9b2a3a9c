"""How often the attempts of a run have failed so far, from what each has left behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.journal import number, read_events
from unbroken.rundir.last_words import LastWords, read_last_words
from unbroken.rundir.save_interval import SaveInterval, read_save_interval

# What a person asks a run to stop by; all else that stops one takes it from its machine.
_BY_A_PERSON = ("unbroken stop", "signal SIGINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """`count` attempts ended otherwise than by themselves or by a person, in `lived_seconds` of them all.

    An attempt that made no progress counts for nothing: no save could have kept any.
    """

    count: int = 0
    lived_seconds: float = 0.0


def failures_before(directory: Path, attempt: int) -> Failures:
    """Return the failures of the attempts of the run in `directory` before `attempt`."""
    ended = [
        (lived, read_last_words(place))
        for place in _places(directory, attempt)
        if (lived := _lived_seconds(place)) > 0
    ]
    return Failures(
        count=sum(is_failure(words) for _, words in ended), lived_seconds=sum(lived for lived, _ in ended)
    )


def interval_before(directory: Path, attempt: int) -> SaveInterval | None:
    """Return the interval that the attempts before `attempt` came to, None if they had none."""
    found = (read_save_interval(place) for place in reversed([*_places(directory, attempt)]))
    return next((interval for interval in found if interval is not None), None)


def is_failure(words: LastWords | None) -> bool:
    """Tell by the last words of an attempt whether it failed; a machine that was taken away counts."""
    if words is None or words.ending in ("running", "failed"):
        return True
    # A run that goes back to an earlier state by itself has lost what came after it.
    if words.ending == "stopped":
        return not words.reason.startswith(_BY_A_PERSON)
    return False


def _places(directory: Path, attempt: int) -> Iterable[Path]:
    return (
        layout.attempt_directory(directory, number)
        for number in layout.attempts(directory)
        if number < attempt
    )


def _lived_seconds(place: Path) -> float:
    """Return for how long an attempt has trained: from its first event to its last beat; 0 if it has not."""
    try:
        beat = read_heartbeat(place / layout.HEARTBEAT)
        first = next(read_events(place / layout.events_file()), None)
    except StorageError:
        # One of many: it is as if it had never been.
        return 0.0
    began = number(first["time"]) if first is not None else None
    if beat is None or began is None or not beat.progress:
        return 0.0
    return max(0.0, beat.wall_seconds - began)
