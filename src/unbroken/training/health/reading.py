"""What detectors are given, and what they return."""

from __future__ import annotations

from typing import NamedTuple


class Reading(NamedTuple):
    """A loss, and what goes with it.

    `since` is the first step after the last one whose loss is known: `step` itself, as a rule. `rate` is the
    highest learning rate, None if nobody knows.
    """

    step: int
    since: int
    loss: float
    rate: float | None


class Onset(NamedTuple):
    """The first bad step, and what is bad in words; a loss above `limit` would be so, too."""

    first_step: int
    text: str
    limit: float | None = None
