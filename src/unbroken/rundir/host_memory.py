"""How much of the host's memory is used, where this process has a limit: its memory groups, the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unbroken.rundir.control_groups import ControlGroup, control_groups

_MEMINFO = "/proc/meminfo"
_BUFFER_BYTES = 8192
# Below this share a reading costs as little as possible; above it, it is exact.
_NEAR = 0.6
# What the kernel gives back before it ends anybody: files that it can read again.
_GIVEN_BACK = {
    1: (b"total_inactive_file", b"total_active_file"),
    2: (b"inactive_file", b"active_file", b"slab_reclaimable"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One reading. `own_bytes` is what this run holds of it: it grows where the run is what grows."""

    used_bytes: int
    limit_bytes: int
    own_bytes: int


class Memory(Protocol):
    """Something that a run can use up. `name` completes "3.9 of 4.0 GB of ..."."""

    name: str
    every_seconds: float

    def read(self) -> Use | None:
        """Return how much of it is used; None if that is far from the limit or cannot be read."""

    def close(self) -> None:
        """Release what is held."""


class MemoryGroup:
    """A memory cgroup (version 1 or 2) in `directory` that has a limit."""

    name = "its memory group"
    every_seconds = 0.2

    def __init__(self, directory: Path, version: int) -> None:
        usage, limit = _FILES[version]
        self._limit = os.open(directory / limit, os.O_RDONLY | os.O_CLOEXEC)
        self._usage = os.open(directory / usage, os.O_RDONLY | os.O_CLOEXEC)
        self._stat = os.open(directory / "memory.stat", os.O_RDONLY | os.O_CLOEXEC)
        self._given_back = _GIVEN_BACK[version]

    def read(self) -> Use | None:
        try:
            # Each time: it can be changed while the group is in use.
            limit, used = _number(self._limit), _number(self._usage)
            if limit is None or used is None or used < _NEAR * limit:
                return None
            used -= self._reclaimable()
        except OSError:
            # The group was removed: this process was moved to another, which is not watched.
            return None
        return Use(used_bytes=used, limit_bytes=limit, own_bytes=used) if used >= _NEAR * limit else None

    def close(self) -> None:
        for descriptor in (self._limit, self._usage, self._stat):
            os.close(descriptor)

    def _reclaimable(self) -> int:
        lines = os.pread(self._stat, _BUFFER_BYTES, 0).splitlines()
        values = dict(line.split(b" ", 1) for line in lines if b" " in line)
        return sum(int(values.get(name, 0)) for name in self._given_back)


class MachineMemory:
    """The memory of this machine, of which the run uses what its processes hold."""

    name = "this machine's memory"
    every_seconds = 0.5

    def __init__(self) -> None:
        self._meminfo = os.open(_MEMINFO, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Use | None:
        text = os.pread(self._meminfo, 256, 0)
        total, available = _kilobytes(text, b"MemTotal:"), _kilobytes(text, b"MemAvailable:")
        if total is None or available is None or total - available < _NEAR * total:
            return None
        return Use(used_bytes=total - available, limit_bytes=total, own_bytes=resident_bytes(os.getpid()))

    def close(self) -> None:
        os.close(self._meminfo)


def host_memories() -> list[Memory]:
    """Return what limits the host memory of this process, as far as it can be read."""
    found: list[Memory] = []
    with suppress(OSError):
        found.append(MachineMemory())
    for directory, version in _limited(control_groups()):
        with suppress(OSError):
            found.append(MemoryGroup(directory, version))
    return found


def resident_bytes(process_id: int) -> int:
    """Return what a process and its children hold; pages that they share count for each of them."""
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_bytes().split()[1])
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_bytes().split()
    except (OSError, IndexError):
        # It ended meanwhile, or this kernel does not list children.
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes"),
    2: ("memory.current", "memory.max"),
}


def _limited(groups: dict[str, ControlGroup]) -> Iterator[tuple[Path, int]]:
    """Yield the directories of memory groups with a limit, of `groups` and above, and their version."""
    for name, version in (("memory", 1), ("unified", 2)):
        for directory in groups[name].upwards() if name in groups else ():
            if _has_limit(directory, version):
                yield directory, version


def _has_limit(directory: Path, version: int) -> bool:
    try:
        limit = (directory / _FILES[version][1]).read_bytes().strip()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except OSError:
        return False
    # No limit is "max" in version 2, and a number beyond all memory in version 1.
    return limit.isdigit() and int(limit) < total


def _number(descriptor: int) -> int | None:
    text = os.pread(descriptor, 64, 0).strip()
    return int(text) if text.isdigit() else None


def _kilobytes(text: bytes, name: bytes) -> int | None:
    at = text.find(name)
    return int(text[at + len(name) :].split(b"kB", 1)[0]) * 1024 if at >= 0 else None
