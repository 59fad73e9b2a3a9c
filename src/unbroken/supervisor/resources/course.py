"""The course of a run in a bounded number of rows: the longer it lasts, the farther apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json

_MAX_ROWS = 240
_FIRST_EVERY_SECONDS = 60.0
COLUMNS = (
    *("time", "attempt", "step", "steps_per_second", "data_wait_share"),
    *("cpu_cores", "memory_bytes", "memory_left_bytes", "disk_free_bytes"),
)


class Course:
    """Rows of `COLUMNS` over the whole run in `directory`, kept there for whoever looks or takes over."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / layout.RESOURCES_HISTORY_FILE
        self.every_seconds, self.rows = _read(self._path)

    def add(self, values: dict[str, Any]) -> bool:
        """Take a row if one is due; return whether it was. Raises StorageError if it cannot be kept."""
        row = [values.get(column) for column in COLUMNS]
        since = row[0] - self.rows[-1][0] if self.rows else self.every_seconds
        # Clocks are set back, too.
        if 0 <= since < self.every_seconds:
            return False
        self.rows.append(row)
        if len(self.rows) > _MAX_ROWS:
            self.rows = self.rows[::2]
            self.every_seconds *= 2
        value = {"every_seconds": self.every_seconds, "columns": list(COLUMNS), "rows": self.rows}
        write_json(self._path, value, durable=False)
        return True


def read_column(directory: Path, name: str) -> Sequence[float]:
    """Return what is known of one of `COLUMNS` over the run in `directory`, oldest first."""
    _, rows = _read(directory / layout.RESOURCES_HISTORY_FILE)
    place = COLUMNS.index(name)
    return [row[place] for row in rows if isinstance(row[place], int | float)]


def _read(path: Path) -> tuple[float, list[list[Any]]]:
    # What cannot be read begins anew: it is there to be looked at, and nothing depends on it.
    with suppress(StorageError, KeyError, TypeError, ValueError):
        value = read_json(path)
        if value is not None and value["columns"] == list(COLUMNS):
            rows = [list(row) for row in value["rows"] if len(row) == len(COLUMNS)]
            return float(value["every_seconds"]), [row for row in rows if isinstance(row[0], int | float)]
    return _FIRST_EVERY_SECONDS, []
