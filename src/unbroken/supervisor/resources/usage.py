"""What the attempt and its machine use right now, as the kernel tells it: memory, processor, disk.

Nothing here waits, and nothing raises: what cannot be read is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from unbroken.rundir.control_groups import control_groups

MemoryLimit: TypeAlias = Literal["control group", "machine"]

_PROC = Path("/proc")
# Version 1 has no word for "no limit" but a number that no machine has.
_UNLIMITED_BYTES = 1 << 60
_MEMORY_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    "unified": ("memory.max", "memory.current"),
}
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUsage:
    """What all processes of a tree use together.

    `cpu_seconds` is the time they have used so far, with that of children that ended. Memory is that of
    each process alone plus the largest amount that one of them shares, such as libraries: pages that were
    inherited by a fork and not written to since count for each.
    """

    processes: int
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How much memory is left below the limit that is nearest, and whose limit that is."""

    limit_bytes: int
    left_bytes: int
    limit: MemoryLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """A file system: its size and what is free for us. `inodes_free` is None where they are not counted."""

    size_bytes: int
    free_bytes: int
    inodes_free: int | None


@dataclass(frozen=True, slots=True)
class _Process:
    process_id: int
    parent_id: int
    cpu_ticks: int


def tree_usage(roots: Iterable[int], *, proc: Path = _PROC) -> TreeUsage | None:
    """Return what the processes `roots` and all below them use, without this process itself.

    None if nothing of it is there. One look at every process of the machine: about 30 microseconds each.
    """
    members = _members(roots, proc)
    if not members:
        return None
    memory = [_memory(str(proc), member.process_id) for member in members]
    return TreeUsage(
        processes=len(members),
        cpu_seconds=sum(member.cpu_ticks for member in members) / _TICKS,
        memory_bytes=sum(own for own, _ in memory) + max(shared for _, shared in memory),
    )


def tree_members(roots: Iterable[int]) -> set[int]:
    """Return the numbers of the processes `roots` and of all below them, without this process itself."""
    return {member.process_id for member in _members(roots, _PROC)}


def headroom(process_id: int, *, proc: Path = _PROC) -> Headroom | None:
    """Return how much more memory the process `process_id` could get: of its control groups, or at all."""
    found = [*_of_groups(process_id, proc), *_of_machine(proc)]
    return min(found, key=lambda room: room.left_bytes, default=None)


def disk_space(path: Path) -> DiskSpace | None:
    """Return what is free on the file system of `path`."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return DiskSpace(
        size_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        inodes_free=found.f_favail if found.f_files else None,
    )


def _members(roots: Iterable[int], proc: Path) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    wanted = set(roots)
    members: list[_Process] = []
    for process in _processes(str(proc)):
        children.setdefault(process.parent_id, []).append(process)
        if process.process_id in wanted:
            members.append(process)
    todo, seen = list(wanted), set(wanted)
    while todo:
        for below in children.get(todo.pop(), []):
            if below.process_id not in seen:
                seen.add(below.process_id)
                todo.append(below.process_id)
                members.append(below)
    return [member for member in members if member.process_id != os.getpid()]


def _processes(proc: str) -> Iterable[_Process]:
    try:
        entries = os.listdir(proc)
    except OSError:
        return
    for entry in entries:
        if not entry.isdecimal():
            continue
        text = _read(f"{proc}/{entry}/stat")
        # The name stands in brackets and may hold anything; what follows begins with field 3.
        fields = text.rpartition(b")")[2].split(maxsplit=15)
        if len(fields) > 14:
            ticks = sum(int(field) for field in fields[11:15])
            yield _Process(int(entry), int(fields[1]), ticks)


def _memory(proc: str, process_id: int) -> tuple[int, int]:
    """Return the bytes of its own that a process holds in memory, and those of files and shared memory.

    What it shares could be told exactly by smaps_rollup, but that walks all its pages, a second and more for
    a large one, and makes it wait meanwhile.
    """
    fields = _read(f"{proc}/{process_id}/statm").split()
    if len(fields) < 3:
        return 0, 0
    resident, shared = int(fields[1]), int(fields[2])
    return max(0, resident - shared) * _PAGE_BYTES, shared * _PAGE_BYTES


def _of_groups(process_id: int, proc: Path) -> Iterable[Headroom]:
    """Yield what each group from that of the process up to the mount leaves: the limit may be any's."""
    groups = control_groups(process_id, proc=proc)
    for name, (limit_file, usage_file) in _MEMORY_FILES.items():
        for directory in groups[name].upwards() if name in groups else ():
            group = str(directory)
            limit, usage = _number(f"{group}/{limit_file}"), _number(f"{group}/{usage_file}")
            if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
                # Pages of files that nobody used lately are given up before a process is ended.
                spare = _line(f"{group}/memory.stat", b"total_inactive_file", b"inactive_file")
                left = max(0, limit - max(0, usage - spare))
                yield Headroom(limit_bytes=limit, left_bytes=left, limit="control group")


def _of_machine(proc: Path) -> Iterable[Headroom]:
    path = str(proc / "meminfo")
    total, available = _line(path, b"MemTotal:"), _line(path, b"MemAvailable:")
    if total:
        yield Headroom(limit_bytes=total * 1024, left_bytes=available * 1024, limit="machine")


def _line(path: str, *names: bytes) -> int:
    """Return the number behind the first of `names` that stands in the file, or 0."""
    values = {fields[0]: fields[1] for line in _read(path).splitlines() if len(fields := line.split()) > 1}
    return next((int(values[name]) for name in names if name in values), 0)


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
