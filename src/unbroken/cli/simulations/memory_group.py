"""A memory cgroup with a small limit, for a moment: in it the kernel ends what takes more."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.rundir.control_groups import control_groups

_LIMIT_BYTES = 160 << 20
_REMOVE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group; `through` is a command that runs the one that follows it, inside."""

    directory: Path

    @property
    def through(self) -> tuple[str, ...]:
        enter = f'echo $$ > "{self.directory}/cgroup.procs" && exec "$@"'
        return ("sh", "-c", enter, "sh")


@contextmanager
def memory_group() -> Iterator[Group | None]:
    """Yield a new group with a limit, or None where none can be made; it is removed at the end."""
    directory = next((place for place in _places() if _make(place)), None)
    if directory is None:
        yield None
        return
    try:
        yield Group(directory=directory)
    finally:
        _remove(directory)


def _places() -> Iterator[Path]:
    """Yield where a group may be made: below our own, else below one above it."""
    groups = control_groups()
    for kind in ("memory", "unified"):
        if kind in groups:
            yield from (place / f"unbroken-simulate-{os.getpid()}" for place in groups[kind].upwards())


def _make(directory: Path) -> bool:
    try:
        directory.mkdir()
    except OSError:
        return False
    # What goes to swap is not ended, and takes long.
    with suppress(OSError):
        (directory / "memory.swap.max").write_text("0")
    for limit in ("memory.limit_in_bytes", "memory.max"):
        if (directory / limit).exists():
            with suppress(OSError):
                (directory / limit).write_text(str(_LIMIT_BYTES))
                if _can_be_entered(directory):
                    return True
    _remove(directory)
    return False


def _can_be_entered(directory: Path) -> bool:
    """Try it: the rights to make a group, to limit it and to move a process there are three things."""
    tried = subprocess.run(
        [*Group(directory=directory).through, "true"], capture_output=True, check=False, timeout=10
    )
    return tried.returncode == 0


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + _REMOVE_SECONDS
    for place in (*directory.glob("*/"), directory):
        while place.exists():
            try:
                place.rmdir()
            except OSError:
                # Its last process is about to be gone.
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
