"""Where a file was written that speaks of processes: a copy of a run directory must not believe it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def place_of(directory: Path) -> dict[str, Any]:
    """Return what `is_elsewhere` needs, to be written into a file in `directory`."""
    try:
        found = os.stat(directory)
    except OSError:
        return {"directory": str(directory)}
    return {"directory": str(directory), "device": found.st_dev, "inode": found.st_ino}


def is_elsewhere(place: dict[str, Any], directory: Path) -> bool:
    """Tell whether what was written at `place` speaks of another directory, of which this is a copy.

    One that was moved is the same, also where another took its old place since.
    """
    original = place.get("directory")
    if not isinstance(original, str):
        return False
    try:
        here = os.stat(directory)
        if (here.st_dev, here.st_ino) == (place.get("device"), place.get("inode")):
            return False
        # Moved to another disk nothing is left of it; and there may be several ways to one place.
        return not os.path.samestat(os.stat(original), here)
    except OSError:
        return False


def is_same_place(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Tell whether two paths lead to one directory."""
    if os.fspath(one) == os.fspath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
