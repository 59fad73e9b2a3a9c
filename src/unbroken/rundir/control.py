"""Requests to a running attempt, as files: seen by every rank at its next step, no signal needed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Save and stop, before `deadline_seconds` (seconds since 1970) if it is given.

    `is_preemption` tells that nobody wanted the run to end: it is to go on elsewhere or later.
    """

    reason: str
    deadline_seconds: float | None
    is_preemption: bool = False


def request_stop(
    directory: Path, *, reason: str, deadline_seconds: float | None = None, is_preemption: bool = False
) -> StopRequest:
    """Ask the run in `directory` to save and stop; it stays asked until `clear_stop`.

    Returns the request that now stands: with one that was there already, both of them as in `merged`.
    """
    request = StopRequest(reason=reason, deadline_seconds=deadline_seconds, is_preemption=is_preemption)
    there = read_stop(directory)
    standing = merged(there, request)
    if standing != there:
        replace_stop(directory, standing)
    return standing


def replace_stop(directory: Path, request: StopRequest) -> None:
    """Put `request` in the place of one that may be there, whatever that says."""
    write_json(
        directory / layout.STOP_FILE,
        {
            "reason": request.reason,
            "deadline": request.deadline_seconds,
            "is_preemption": request.is_preemption,
            "requested": time.time(),
        },
    )


def merged(there: StopRequest | None, request: StopRequest) -> StopRequest:
    """Return the one request that says what both do.

    The earlier deadline counts: somebody means it. A stop that a person asked for stays theirs, whatever
    shortens it; of two alike the words are those of the one that leaves less time.

    >>> machine = StopRequest(reason="preemption", deadline_seconds=100.0, is_preemption=True)
    >>> both = merged(machine, StopRequest(reason="unbroken stop", deadline_seconds=900.0))
    >>> both.reason, both.deadline_seconds, both.is_preemption
    ('unbroken stop', 100.0, False)
    """
    if there is None:
        return request
    first, second = sorted((there, request), key=lambda one: (one.is_preemption, _deadline(one)))
    earliest = min(first, second, key=_deadline)
    return replace(first, deadline_seconds=earliest.deadline_seconds)


def _deadline(request: StopRequest) -> float:
    return math.inf if request.deadline_seconds is None else request.deadline_seconds


def can_still_save(request: StopRequest | None, save_seconds: float, now_seconds: float) -> bool:
    """Tell whether a save that begins now ends before the deadline, if it takes as long as the last one.

    `save_seconds` is 0 if there was none, `now_seconds` is since 1970. A save that cannot end is worse
    than none: it keeps the disk and the network from what was saved before.

    >>> hurry = StopRequest(reason="preemption", deadline_seconds=100.0)
    >>> can_still_save(hurry, 20.0, 70.0), can_still_save(hurry, 20.0, 90.0), can_still_save(hurry, 0.0, 90.0)
    (True, False, True)
    """
    if request is None or request.deadline_seconds is None:
        return True
    return save_seconds <= 0 or now_seconds + save_seconds <= request.deadline_seconds


def read_stop(directory: Path) -> StopRequest | None:
    """Return the stop request of the run in `directory`, or None.

    A request that cannot be read still is one: stopping with the state saved is the safe side.
    """
    try:
        value = read_json(directory / layout.STOP_FILE)
    except StorageError:
        return StopRequest(reason="a stop request that cannot be read", deadline_seconds=None)
    if value is None:
        return None
    deadline = value.get("deadline")
    return StopRequest(
        reason=str(value.get("reason", "")),
        deadline_seconds=float(deadline) if isinstance(deadline, int | float) else None,
        is_preemption=value.get("is_preemption") is True,
    )


def clear_stop(directory: Path) -> None:
    """Withdraw a stop request; none is no error."""
    (directory / layout.STOP_FILE).unlink(missing_ok=True)


def take_save_request(directory: Path) -> bool:
    """Tell whether a checkpoint was asked for since the last call."""
    try:
        (directory / layout.SAVE_NOW_FILE).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def request_save(directory: Path) -> None:
    """Ask the run in `directory` for a checkpoint at its next step."""
    write_json(directory / layout.SAVE_NOW_FILE, {"requested": time.time()})
