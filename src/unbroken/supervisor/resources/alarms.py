"""What somebody should know before it goes wrong: memory or disk that runs out, data that is too slow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

AlarmKind: TypeAlias = Literal["memory", "disk", "loader"]

_MEMORY_SECONDS = 3600.0
# Long enough for somebody who sleeps.
_DISK_SECONDS = 6 * 3600.0
_WAIT_SHARE = 0.30
# An alarm that stands ends only well beyond its threshold, or it would come and go.
_CLEAR_FACTOR = 2.0
_CLEAR_WAIT_SHARE = 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something to know, in one line, and what to do about it."""

    kind: AlarmKind
    text: str
    hint: str


def alarms(
    *,
    memory_seconds: float | None,
    disk_seconds: float | None,
    wait_share: float | None,
    standing: Collection[str] = (),
) -> list[Alarm]:
    """Return the alarms that are due, by when memory and disk are used up and the share of time waited.

    `standing` are the kinds of those that were due before. None is what is not known, or not in sight.
    """
    found = []
    if _is_near(memory_seconds, _MEMORY_SECONDS, "memory" in standing):
        found.append(
            Alarm(
                kind="memory",
                text=f"at the present growth the memory is used up in {_minutes(memory_seconds)}",
                hint="look for what keeps growing, such as a list of losses that keeps their graphs; "
                "fewer data workers need less",
            )
        )
    if _is_near(disk_seconds, _DISK_SECONDS, "disk" in standing):
        found.append(
            Alarm(
                kind="disk",
                text=f"at the present rate the disk is full in {_minutes(disk_seconds)}",
                hint="keep fewer checkpoints, `unbroken prune` deletes some; or free other space",
            )
        )
    threshold = _CLEAR_WAIT_SHARE if "loader" in standing else _WAIT_SHARE
    if wait_share is not None and wait_share > threshold:
        found.append(
            Alarm(
                kind="loader",
                text=f"training waits for batches {wait_share:.0%} of its time",
                hint="the loader is the bottleneck: more workers (num_workers=) or less work for each sample",
            )
        )
    return found


def _is_near(seconds: float | None, threshold: float, is_standing: bool) -> bool:
    return seconds is not None and seconds < threshold * (_CLEAR_FACTOR if is_standing else 1.0)


def _minutes(seconds: float | None) -> str:
    minutes = round((seconds or 0.0) / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
