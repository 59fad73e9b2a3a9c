"""Small files that are always whole: replaced by rename; those of JSON are read without trust."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir.processes import identify
from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.storage.failures import failed
from unbroken.storage.local import sync_directory


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Replace the file at `path` by `value`; readers see the old or the new value, never half."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise failed("create", path.parent, error) from error
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the file at `path` by `text`, likewise; its directory is there."""
    temporary = _temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise failed("write", path, error) from error


def create_json(path: Path, value: dict[str, Any]) -> bool:
    """Write `value` to `path` unless the file exists; return whether this call made it.

    Of several processes that race, exactly one gets True, and none ever sees half a file.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise failed("create", path.parent, error) from error
    write_json(temporary, value)
    try:
        os.link(temporary, path)
        sync_directory(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise failed("create", path, error) from error
    finally:
        temporary.unlink()
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in the file at `path`, or None if there is no file.

    Raises StorageError when the file cannot be read or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failed("read", path, error) from error
    except ValueError as error:
        raise StorageError(
            f"{path}: expected a JSON object, found other bytes ({error})",
            hint="restore that file from a copy, or move it away",
        ) from error
    if not isinstance(value, dict):
        raise StorageError(
            f"{path}: expected a JSON object, found {type(value).__name__}",
            hint="restore that file from a copy, or move it away",
        )
    return value


def sweep_temporary(directory: Path) -> list[str]:
    """Remove what `left_temporary` finds directly in `directory`; return the names."""
    left = left_temporary(directory)
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in left]


def left_temporary(directory: Path) -> list[Path]:
    """Return what processes left directly in `directory` which died while writing; none if it is not there.

    What is of processes that live is left out: several write to a run directory.
    """
    return [
        path
        for path in directory.glob(f"{TEMPORARY_PREFIX}*")
        if (process_id := path.name.removeprefix(TEMPORARY_PREFIX).partition("-")[0]).isdecimal()
        and identify(int(process_id)) is None
    ]


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")
