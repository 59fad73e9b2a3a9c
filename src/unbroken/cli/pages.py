"""HTML pages that commands write where a user says: never over a file that is something else."""

from __future__ import annotations

import os
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.rundir.files import write_text
from unbroken.storage.failures import translated

_BEGINNING = b"<!doctype html>"


def check_place(path: Path) -> None:
    """Raise UsageError unless a page can be written to `path`: into a directory, over nothing but a page.

    Raises StorageError if it cannot be looked at.
    """
    with translated("look at", str(path)):
        is_in_directory, is_directory = path.absolute().parent.is_dir(), path.is_dir()
        found = _first_bytes(path) if path.is_file() else b""
    if not is_in_directory:
        raise UsageError(f"{path}: its directory does not exist", hint="make it, or choose another")
    if is_directory:
        raise UsageError(f"{path}: expected the name of a file, found a directory", hint="name a file in it")
    if found and found.lower() != _BEGINNING:
        raise UsageError(
            f"{path}: expected no file, or a page to replace, found something else",
            hint="nothing but pages is overwritten: give another name",
        )


def write(path: Path, text: str) -> None:
    """Write a page. Raises UsageError as `check_place` does, StorageError if it cannot be written."""
    check_place(path)
    if path.exists() and not path.is_file():
        # A pipe or a device, which nothing can take the place of.
        with translated("write", str(path)):
            path.write_text(text, encoding="utf-8")
        return
    # A link stays one.
    write_text(Path(os.path.realpath(path)), text)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_BEGINNING))
