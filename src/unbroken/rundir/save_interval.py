"""How often a run with save="auto" saves, and the numbers that this follows from: for whoever asks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json

# What an interval is limited by, if it is.
# floor: to save more often costs more than it keeps.   ceiling: more would be lost than is allowed.
Limit: TypeAlias = Literal["", "floor", "ceiling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval:
    """Save when `seconds` have passed since the last checkpoint.

    A save stops training for `cost_seconds`, None before the first was measured, and is durable after
    `durable_seconds`. There were `failures` in `lived_seconds` of training, over all attempts.
    """

    seconds: float
    cost_seconds: float | None
    durable_seconds: float
    failures: int
    lived_seconds: float
    limit: Limit = ""

    def reason(self) -> str:
        """Return in words why it is that long."""
        cost = (
            "no save was measured yet"
            if self.cost_seconds is None
            else f"a save stops training for {self.cost_seconds:.2g} s"
        )
        count = {0: "no failure", 1: "one failure"}.get(self.failures, f"{self.failures} failures")
        limited = {"": "", "floor": ", as often as is sensible", "ceiling": ", more must not be lost"}
        return f"{cost}, {count} in {in_hours(self.lived_seconds)} so far{limited[self.limit]}"


def in_hours(seconds: float) -> str:
    """Return how long a run has trained, in the unit that fits.

    >>> in_hours(40), in_hours(1500), in_hours(9.2 * 3600), in_hours(90 * 3600)
    ('40 s', '25 min', '9.2 h', '90 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 24 * 3600 else f"{seconds / 3600:.0f} h"


def write_save_interval(attempt_directory: Path, interval: SaveInterval) -> None:
    """Write the record of an attempt in place of an earlier one; not durably: it is made anew."""
    write_json(attempt_directory / layout.SAVE_INTERVAL_FILE, asdict(interval), durable=False)


def read_save_interval(attempt_directory: Path) -> SaveInterval | None:
    """Return the record of an attempt, or None if it has none that can be read."""
    try:
        value = read_json(attempt_directory / layout.SAVE_INTERVAL_FILE)
    except StorageError:
        return None
    if value is None:
        return None
    # Not at the top: the list of runs starts without it.
    import msgspec

    try:
        return msgspec.convert(value, SaveInterval)
    except msgspec.ValidationError:
        # What a save has cost is measured again.
        return None
