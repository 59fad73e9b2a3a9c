"""Where runs are: small files in the user's state directory, so that a name suffices anywhere."""

from __future__ import annotations

import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json

_FORGET_AFTER_SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run that was started on this machine; `started_seconds` is of its last start."""

    name: str
    directory: Path
    started_seconds: float

    @property
    def is_there(self) -> bool:
        return (self.directory / layout.RUN_FILE).is_file()


def register(name: str, directory: Path) -> None:
    """Remember that the run `name` was started in `directory`. Raises StorageError."""
    place = _place()
    _forget_the_gone(place)
    # The name is for people who look; the checksum keeps apart equal names of different places.
    mark = zlib.crc32(os.fsencode(directory))
    write_json(
        place / f"{name}-{mark:08x}.json",
        {"name": name, "directory": str(directory), "started": time.time()},
    )


def known_runs() -> list[KnownRun]:
    """Return the runs whose directory is still there, the last started first."""
    return [run for run in registered_runs() if run.is_there]


def registered_runs() -> list[KnownRun]:
    """Return also those whose directory is not there, or not now, the last started first."""
    runs = [run for _, run in _entries(_place())]
    return sorted(runs, key=lambda run: run.started_seconds, reverse=True)


def _place() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    state = Path(base) if base else Path.home() / ".local" / "state"
    return state / "unbroken" / "runs"


def _entries(place: Path) -> list[tuple[Path, KnownRun]]:
    try:
        paths = [path for path in place.iterdir() if path.suffix == ".json"]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    found = []
    for path in paths:
        run = _read(path)
        if run is not None:
            found.append((path, run))
    return found


def _read(path: Path) -> KnownRun | None:
    try:
        value = read_json(path)
        if value is None:
            return None
        return KnownRun(
            name=str(value["name"]),
            directory=Path(value["directory"]),
            started_seconds=float(value["started"]),
        )
    except (StorageError, KeyError, TypeError, ValueError):
        # A convenience: what cannot be read names no run, and its path still works.
        return None


def _forget_the_gone(place: Path) -> None:
    for path, run in _entries(place):
        # Not at once: its directory may be on a disk that is not mounted now.
        is_old = time.time() - run.started_seconds > _FORGET_AFTER_SECONDS
        if is_old and not run.directory.exists():
            with suppress(OSError):
                path.unlink()
