"""Whose directory this is: run.json, and the number of the next attempt."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import FormatVersionError, NotARunError, StaleWriterError, StorageError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.files import create_json, read_json
from unbroken.rundir.processes import ProcessIdentity
from unbroken.storage.failures import failed

_FORMAT = "unbroken-run"
# Without run.json, any of these names means that something of ours was damaged or half copied.
_OURS = (layout.CHECKPOINTS, layout.ATTEMPTS, layout.QUARANTINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What run.json says. `run_id` is unique; `name` is for people."""

    run_id: str
    name: str
    created_seconds: float


def open_run(directory: Path, *, name: str | None = None) -> RunIdentity:
    """Return the identity of the run in `directory`; a new or foreign-free directory becomes a run.

    Raises:
        NotARunError: run.json is unreadable, or missing although checkpoints are there.
        FormatVersionError: a newer release made the directory.
        StorageDeniedError: the directory cannot be made or written.
    """
    found = read_run(directory)
    if found is not None:
        return found
    _refuse_orphaned(directory)
    value = {
        "format": _FORMAT,
        "format_version": layout.FORMAT_VERSION,
        "run_id": f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}",
        "name": name or directory.resolve().name,
        "created": time.time(),
    }
    create_json(directory / layout.RUN_FILE, value)
    # Of two that raced, both take what the winner wrote.
    found = read_run(directory)
    assert found is not None
    return found


def read_run(directory: Path) -> RunIdentity | None:
    """Return the identity of the run in `directory`, or None if it holds no run.json."""
    path = directory / layout.RUN_FILE
    try:
        value = read_json(path)
    except StorageError as error:
        if directory.exists() and not directory.is_dir():
            raise
        raise NotARunError(error.message, hint=error.hint) from error
    if value is None:
        return None
    if value.get("format") != _FORMAT:
        raise NotARunError(
            f"{path}: expected format {_FORMAT!r}, found {value.get('format')!r}",
            hint="this directory belongs to another program; choose another run directory",
        )
    version = value.get("format_version")
    if not isinstance(version, int) or version > layout.FORMAT_VERSION:
        raise FormatVersionError(
            f"{path}: expected format version {layout.FORMAT_VERSION} or older, found {version!r}",
            hint="install the release of unbroken that wrote it, or a newer one",
        )
    try:
        return RunIdentity(
            run_id=str(value["run_id"]), name=str(value["name"]), created_seconds=float(value["created"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NotARunError(
            f"{path}: expected run_id, name and created, found {sorted(value)}",
            hint="restore run.json from a copy; the checkpoints beside it are untouched",
        ) from error


def claim_attempt(directory: Path) -> int:
    """Return the number of this attempt, from 1; it is the fencing token of its writer.

    Under a supervisor the number comes from the environment; otherwise the next free one is taken.
    """
    given = given_attempt(directory)
    return new_attempt(directory) if given is None else given


def given_attempt(directory: Path) -> int | None:
    """Return the attempt that a supervisor started this process as, or None without one.

    Raises UsageError if the environment names an attempt that `directory` does not have.
    """
    given = os.environ.get(layout.ATTEMPT_VARIABLE)
    if given is None:
        return None
    if not given.isdecimal() or not layout.attempt_directory(directory, int(given)).is_dir():
        raise UsageError(
            f"{layout.ATTEMPT_VARIABLE}={given!r}: expected the number of an attempt in {directory}",
            hint=f"unset {layout.ATTEMPT_VARIABLE}, or start the script by `unbroken run`",
        )
    return int(given)


def new_attempt(directory: Path) -> int:
    """Make the directory of the next attempt and return its number."""
    number = max(layout.attempts(directory), default=0) + 1
    while True:
        path = layout.attempt_directory(directory, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # mkdir is the atomic claim: of two starters each gets a number of its own.
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise failed("create", path, error) from error
        return number


def check_not_superseded(directory: Path, attempt: int, holder: ProcessIdentity) -> None:
    """Raise StaleWriterError if there is a newer attempt, or another process than `holder` writes.

    The lock alone is not enough: a process that slept while its lock was lost on a network file
    system would wake up and write beside its successor.
    """
    newest = max(layout.attempts(directory), default=attempt)
    words = read_json(directory / layout.WRITER_FILE)
    found = None if words is None else ProcessIdentity.from_json(words)
    if newest != attempt or found != holder:
        raise StaleWriterError(
            f"{directory}: attempt {attempt} was superseded by attempt {newest}",
            hint="end this process; the newer attempt goes on from the last checkpoint",
        )


def _refuse_orphaned(directory: Path) -> None:
    there = [name for name in _OURS if (directory / name).exists()]
    if there:
        raise NotARunError(
            f"{directory}: expected {layout.RUN_FILE} beside {', '.join(there)}, found none",
            hint=f"restore {layout.RUN_FILE} from a copy, or choose another run directory",
        )
