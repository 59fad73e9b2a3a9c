"""Keeps an observed script, which works in a copy, from writing into the user's own directory."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from unbroken.errors import UsageError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# How many of its arguments, from the first on, are paths that an event changes.
_CHANGES = {"os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1, "os.rename": 2}
_ONLY_TARGET = ("os.link", "os.symlink")
# Compiled modules lie beside their sources, wherever these were found.
_COMPILED = f"{os.sep}__pycache__"


def guard(original: str, allowed: Sequence[str]) -> None:
    """Refuse from now on what would change anything below `original`, but for what is `allowed`.

    Raises UsageError in the script at such an attempt. Libraries that write without Python are not seen.
    """
    inside = os.path.realpath(original) + os.sep
    places = [os.path.realpath(path) + os.sep for path in (*allowed, tempfile.gettempdir())]
    # Whoever works below the directory for temporary files wants that work left alone, too.
    free = tuple(place for place in places if not inside.startswith(place))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        for path in _changed_by(event, arguments):
            refuse(path)

    def refuse(path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        real = os.path.realpath(os.fsdecode(path)) + os.sep
        if real.startswith(inside) and not real.startswith(free) and _COMPILED not in real:
            raise _refusal(os.path.dirname(real))

    sys.addaudithook(check)


def check_save(path: str, directory: str) -> None:
    """Raise UsageError unless what is saved at `path` belongs to the copy in `directory`.

    Another run would find it elsewhere, and it might be in the place of what the user has there.
    """
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(directory) + os.sep):
        raise _refusal(real)


def _refusal(path: str) -> UsageError:
    return UsageError(
        f"{path}: expected a script that writes to paths relative to where it is started",
        hint="the drill works in a copy and leaves everything else alone; give a relative path",
    )


def _changed_by(event: str, arguments: tuple[Any, ...]) -> Sequence[Any]:
    if event == "open":
        path, _, flags = arguments
        return (path,) if isinstance(flags, int) and flags & _WRITES else ()
    if event in _ONLY_TARGET:
        return arguments[1:2]
    return arguments[: _CHANGES.get(event, 0)]
