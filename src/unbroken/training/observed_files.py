"""Keeps an observed script, which works in a copy, from writing into the user's own directory."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import UsageError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Compiled modules lie beside their sources, wherever these were found.
_COMPILED = f"{os.sep}__pycache__"


@dataclass(frozen=True, slots=True)
class _Change:
    """Where among the arguments of an event a path stands, and the descriptor of what it is relative to.

    Of an entry the directory changes and a link is not followed; otherwise it is what the path leads to.
    """

    path: int
    directory: int | None = None
    is_entry: bool = True
    # Whatever lies below it goes with it.
    is_tree: bool = False


# Removing a tree names all that is in it by descriptors, and asks for each when others are gone already.
_CHANGES: Mapping[str, Sequence[_Change]] = {
    "os.remove": (_Change(0, 1),),
    "os.rmdir": (_Change(0, 1),),
    "os.mkdir": (_Change(0, 2),),
    "os.rename": (_Change(0, 2, is_tree=True), _Change(1, 3, is_tree=True)),
    "os.link": (_Change(1, 3),),
    "os.symlink": (_Change(1, 2),),
    "shutil.rmtree": (_Change(0, 1, is_tree=True),),
    "os.chmod": (_Change(0, 2, is_entry=False),),
    "os.chown": (_Change(0, 3, is_entry=False),),
    "os.utime": (_Change(0, 3, is_entry=False),),
    "os.truncate": (_Change(0, is_entry=False),),
    "os.setxattr": (_Change(0, is_entry=False),),
    "os.removexattr": (_Change(0, is_entry=False),),
}
_OPENED = (_Change(0, is_entry=False),)


def guard(original: str, allowed: Sequence[str]) -> None:
    """Refuse from now on what would change anything below `original`, but for what is `allowed`.

    Raises UsageError in the script at such an attempt. Libraries that write without Python are not seen.
    """
    inside = os.path.realpath(original) + os.sep
    places = [os.path.realpath(path) + os.sep for path in (*allowed, tempfile.gettempdir())]
    # Whoever works below the directory for temporary files wants that work left alone, too.
    free = tuple(place for place in places if not inside.startswith(place))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        for real, is_tree in _changed_by(event, arguments):
            holds_it = is_tree and inside.startswith(real)
            is_inside = real.startswith(inside) and not real.startswith(free) and _COMPILED not in real
            if holds_it or is_inside:
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


def _changed_by(event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, bool]]:
    """Yield where an event changes something, with a separator behind it, and whether all below goes, too."""
    for change in _OPENED if event == "open" and _is_to_write(arguments) else _CHANGES.get(event, ()):
        real = _real(change, arguments)
        if real is not None:
            yield real + os.sep, change.is_tree


def _is_to_write(arguments: tuple[Any, ...]) -> bool:
    path, _, flags = arguments
    # What is open already was refused then, if it had to be.
    return not isinstance(path, int) and isinstance(flags, int) and bool(flags & _WRITES)


def _real(change: _Change, arguments: tuple[Any, ...]) -> str | None:
    path = arguments[change.path] if change.path < len(arguments) else None
    if isinstance(path, int):
        return _of_descriptor(path)
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    text = os.fsdecode(path)
    at = arguments[change.directory] if change.directory and change.directory < len(arguments) else None
    # There is none where it is None or negative.
    if isinstance(at, int) and at >= 0:
        text = os.path.join(_of_descriptor(at) or "", text)
    if not change.is_entry:
        return os.path.realpath(text)
    # A trailing separator would have the link itself followed.
    folder, name = os.path.split(text.rstrip(os.sep) or os.sep)
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(folder), name)


def _of_descriptor(descriptor: int) -> str | None:
    try:
        found = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        # It is not open, which the operation itself will find.
        return None
    # Pipes and the like have no path.
    return found if os.path.isabs(found) else None
