"""A control group of its own for each attempt: what ran out in it is counted, and nothing gets away.

Made where the system lets us: by root, or below a group that was delegated to us. Everything works
without one; the supervisor then knows less of memory, and ends processes one by one.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.processes import identify, read_stat
from unbroken.supervisor.cgroups import SUPERVISOR_GROUP, group_oom_kills, own_groups, subtree
from unbroken.supervisor.records import say

_PREFIX = "unbroken-"
# Empty groups of other runs may still be asked what was counted in them, but not for ever.
_FORGET_AFTER_SECONDS = 86400.0


class Cell:
    """The groups in `directories`, one in each hierarchy that is of use."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(directories)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in these groups for a moment: what is started meanwhile is in them from its first breath."""
        homes = [directory.parent for directory in self.directories]
        back = [home / SUPERVISOR_GROUP if _is_full(home) else home for home in homes]
        for directory in self.directories:
            _move_here(directory)
        try:
            yield
        finally:
            for directory in back:
                if not _move_here(directory):
                    say(f"this process could not be moved to the control group {directory}")

    @property
    def name(self) -> str:
        return self.directories[0].name

    def oom_kills(self) -> int | None:
        """Return how many processes in it the kernel ended for want of memory; None if nobody counts."""
        counts = [group_oom_kills(directory) for directory in self.directories]
        known = [count for count in counts if count is not None]
        return max(known) if known else None

    def kill(self) -> None:
        """Send SIGKILL to all that is in it, at once where the kernel can."""
        # We may be in there ourselves, if we could not be moved out again.
        others = [directory for directory in self.directories if os.getpid() not in _members(directory)]
        for directory in others:
            _write(directory / "cgroup.kill", "1")
        # A frozen process forks no more: one look finds all of them.
        freezers = [path / "freezer.state" for path in others if (path / "freezer.state").exists()]
        for state in freezers:
            _write(state, "FROZEN")
        # Those of another namespace show as 0, which would mean all of our own group.
        for process_id in self.members() - {os.getpid(), 0}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
        for state in freezers:
            _write(state, "THAWED")

    def is_empty(self) -> bool:
        """Tell whether no living process is in it; the kernel's word where it gives it."""
        members = self.members()
        if members - {os.getpid()}:
            return False
        return bool(members) or not any(_is_populated(directory) for directory in self.directories)

    def remove(self) -> bool:
        """Remove the groups, and return True if nothing is left of them; they must be empty."""
        for directory in self.directories:
            for group in reversed(subtree(directory)):
                with suppress(OSError):
                    group.rmdir()
        return not any(directory.exists() for directory in self.directories)

    def members(self) -> set[int]:
        """Return the numbers of the processes that are in it, as we see them."""
        return set().union(*(_members(directory) for directory in self.directories))


def make_cell(attempt_directory: Path) -> Cell | None:
    """Return a new cell for the attempt in `attempt_directory`, or None where groups cannot be made."""
    own = own_groups()
    name = f"{_mark(attempt_directory)}{os.getpid()}"
    made = _made(_home(own.unified) if own.unified is not None else None, name)
    has_kill = any((directory / "cgroup.kill").exists() for directory in made)
    made += _made(own.memory, name) + ([] if has_kill else _made(own.freezer, name))
    if not made:
        return None
    try:
        write_json(
            attempt_directory / layout.CELL_FILE,
            {"directories": [str(path) for path in made]},
            durable=False,
        )
    except StorageError as error:
        # Only whoever takes over from us would miss it.
        say(f"could not {error.message}")
    return Cell(made)


def find_cell(attempt_directory: Path) -> Cell | None:
    """Return the cell of an attempt that an earlier supervisor started, or None if it has none now.

    What a copy of a run directory says of the cells of the original is not believed.
    """
    try:
        value = read_json(attempt_directory / layout.CELL_FILE)
    except StorageError:
        return None
    directories = [Path(path) for path in (value or {}).get("directories", [])]
    mark = _mark(attempt_directory)
    there = [path for path in directories if path.name.startswith(mark) and path.is_dir()]
    return Cell(there) if there else None


def remove_cell(attempt_directory: Path, cell: Cell) -> None:
    """Remove the empty cell of an attempt and forget about it."""
    if cell.remove():
        with suppress(OSError):
            (attempt_directory / layout.CELL_FILE).unlink(missing_ok=True)


def living_in_cells(run_directory: Path) -> list[tuple[int, int]]:
    """Return `(process id, attempt)` of what lives in cells of attempts, but for us and those above us."""
    above, ourselves = read_stat(os.getpid()), set()
    while above is not None:
        ourselves.add(above.process_id)
        above = read_stat(above.parent_id)
    found = []
    for attempt in layout.attempts(run_directory):
        cell = find_cell(layout.attempt_directory(run_directory, attempt))
        found += [(member, attempt) for member in sorted(cell.members() - ourselves)] if cell else []
    return found


def remove_old_cells(run_directory: Path) -> None:
    """Remove the empty cells that earlier supervisors of the run in `run_directory` left behind."""
    try:
        attempts = layout.attempts(run_directory)
    except StorageError as error:
        say(f"the control groups of earlier attempts stay: {error.message}")
        return
    for attempt in attempts:
        directory = layout.attempt_directory(run_directory, attempt)
        cell = find_cell(directory)
        if cell is not None:
            remove_cell(directory, cell)


def _mark(attempt_directory: Path) -> str:
    """Return what the names of the cells of this attempt, and of no other, begin with.

    A directory keeps its inode when it is moved, and a copy has another.
    """
    found = attempt_directory.stat()
    place = zlib.crc32(f"{found.st_dev}:{found.st_ino}".encode())
    return f"{_PREFIX}{place:08x}-"


def _made(home: Path | None, name: str) -> list[Path]:
    if home is None:
        return []
    _forget_the_old(home)
    try:
        (home / name).mkdir()
    except OSError:
        return []
    return [home / name]


def _home(group: Path) -> Path:
    """Return the group of version 2 to make cells in, with memory counted in them if that can be had.

    That needs a group without processes of its own: where systemd has put us into a group below the one
    of our unit. To move there ourselves would keep systemd from starting the unit again.
    """
    if group.name != SUPERVISOR_GROUP:
        return group
    _write(group.parent / "cgroup.subtree_control", "+memory")
    return group.parent


def _is_full(home: Path) -> bool:
    return (home / SUPERVISOR_GROUP).is_dir()


def _forget_the_old(home: Path) -> None:
    for path in home.glob(f"{_PREFIX}*-*"):
        maker, cell = path.name.rpartition("-")[2], Cell([path])
        with suppress(OSError):
            if not cell.is_empty():
                # The time begins when it is empty; it may have been in use for weeks.
                os.utime(path)
            elif maker.isdecimal() and identify(int(maker)) is not None:
                # About to use it, or to ask what was counted.
                continue
            elif time.time() - path.stat().st_mtime > _FORGET_AFTER_SECONDS:
                cell.remove()


def _move_here(directory: Path) -> bool:
    return _write(directory / "cgroup.procs", str(os.getpid()))


def _members(directory: Path) -> set[int]:
    found: set[int] = set()
    for group in subtree(directory):
        with suppress(OSError):
            found.update(int(line) for line in (group / "cgroup.procs").read_text().split())
    return found


def _is_populated(directory: Path) -> bool:
    try:
        return "populated 1" in (directory / "cgroup.events").read_text()
    except OSError:
        return False


def _write(path: Path, text: str) -> bool:
    # Never created: where the file is missing the kernel does not know it.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
