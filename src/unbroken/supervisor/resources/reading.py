"""The last reading of what an attempt uses, as it lies in the run directory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an attempt and its machine used at `time` (seconds since 1970); None for what is not known.

    `memory_limit` says whose limit is nearest: "control group" or "machine"; `memory_left_bytes` are below
    it. `..._full_in_seconds` is a forecast, None if it is not in sight. `alarms` are lines for people.
    """

    time: float
    attempt: int
    step: int | None = None
    steps_per_second: float | None = None
    data_wait_share: float | None = None
    processes: int | None = None
    cpu_cores: float | None = None
    cpu_count: int | None = None
    memory_bytes: int | None = None
    memory_growth_bytes_per_hour: float | None = None
    memory_left_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_limit: str | None = None
    memory_full_in_seconds: float | None = None
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    disk_full_in_seconds: float | None = None
    inodes_free: int | None = None
    alarms: tuple[str, ...] = ()


def read_reading(directory: Path) -> Reading | None:
    """Return the last reading of the run in `directory`, or None if there is none that can be read."""
    with suppress(StorageError, KeyError, TypeError, ValueError):
        value = read_json(directory / layout.RESOURCES_FILE)
        if value is not None:
            known = {field.name for field in fields(Reading)}
            named = {name: entry for name, entry in value.items() if name in known}
            return Reading(**{**named, "alarms": tuple(value["alarms"])})
    return None
