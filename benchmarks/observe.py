"""What a piece of work costs, and a quiet moment to do it in. Linux; the numbers come from /proc."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

QUIET_CORES = 0.15
QUIET_WINDOW_SECONDS = 0.3
# Shorter than this, the ticks of the kernel's clock say nothing about others.
SHORTEST_JUDGED_SECONDS = 0.2
# Python has no name for it yet.
_MADV_POPULATE_WRITE = 23
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Processor time and bytes are those of this process and all below it.

    `others_cores` is what everybody else used meanwhile, None for an instant too short to tell.
    """

    seconds: float
    cpu_seconds: float
    written_bytes: int
    others_cores: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    cpu_seconds: float
    user_seconds: float
    machine_user_seconds: float
    written_bytes: int

    @classmethod
    def read(cls) -> _Counters:
        own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        children = [_process_ticks(process) for process in descendants(os.getpid())]
        user = own.ru_utime + ended.ru_utime + sum(ticks[0] for ticks in children) / _TICKS
        system = own.ru_stime + ended.ru_stime + sum(ticks[1] for ticks in children) / _TICKS
        return cls(
            cpu_seconds=user + system,
            user_seconds=user,
            machine_user_seconds=machine_user_seconds(),
            written_bytes=sum(written_bytes(process) for process in [os.getpid(), *descendants(os.getpid())]),
        )


class Watch:
    """Measures what its `with` block costs; `lap` says how long it has run until now."""

    cost: Cost

    def __enter__(self) -> Self:
        self._before = _Counters.read()
        self._began = time.perf_counter()
        return self

    def lap(self) -> float:
        return time.perf_counter() - self._began

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.lap()
        before, after = self._before, _Counters.read()
        user = after.user_seconds - before.user_seconds
        others = (after.machine_user_seconds - before.machine_user_seconds - user) / seconds
        self.cost = Cost(
            seconds=seconds,
            cpu_seconds=after.cpu_seconds - before.cpu_seconds,
            written_bytes=after.written_bytes - before.written_bytes,
            others_cores=max(0.0, others) if seconds >= SHORTEST_JUDGED_SECONDS else None,
        )


def settle(size_bytes: int, wait_seconds: float) -> bool:
    """Flush what others have written, wait for a quiet moment, and return whether one came.

    Meanwhile memory for twice the state is held and given back at the end: a virtual machine may have
    lent its free pages to its host, and whoever touches them first would pay for them.
    """
    os.sync()
    with huge_pages(min(2 * size_bytes, _free_bytes() // 2)):
        return _wait_for_quiet(wait_seconds)


def huge_pages(size_bytes: int) -> mmap.mmap:
    """Return memory of at least this size in huge pages, if there are any, all of it touched."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        # Linux before 5.14.
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start] = 0
    return memory


def _wait_for_quiet(wait_seconds: float) -> bool:
    until = time.monotonic() + wait_seconds
    while True:
        before, own_before = machine_user_seconds(), time.process_time()
        time.sleep(QUIET_WINDOW_SECONDS)
        others = machine_user_seconds() - before - (time.process_time() - own_before)
        if others / QUIET_WINDOW_SECONDS < QUIET_CORES:
            return True
        if time.monotonic() >= until:
            return False


def drop_cached(directory: Path) -> str:
    """Make the next read of `directory` come from the disk, and return how that was done."""
    os.sync()
    if os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    for file in _files(directory):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return "posix_fadvise"


def fill_cache(directory: Path) -> None:
    """Read every file below `directory`, so that the next read comes from memory."""
    piece = bytearray(1 << 20)
    for file in _files(directory):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass


def sync_tree(directory: Path) -> None:
    """Make every file below `directory` durable, and every name, its own included."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync_path(Path(folder) / name)
        sync_path(Path(folder))
    sync_path(directory.parent)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_bytes(directory: Path) -> int:
    """Return what the files below `directory` take on the disk; one with several names counts once."""
    found = {}
    for file in _files(directory):
        facts = file.stat()
        found[facts.st_ino] = 512 * facts.st_blocks
    return sum(found.values())


def reset_peak() -> int:
    """Forget the highest memory use so far, and return the one of now in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def peak_bytes() -> int:
    return _memory("VmHWM")


def resident_bytes() -> int:
    return _memory("VmRSS")


def machine_user_seconds() -> float:
    """Return the time that all processors have spent in programs, nice ones included."""
    user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
    return (int(user) + int(nice)) / _TICKS


def descendants(process: int) -> list[int]:
    """Return the living processes below `process`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [process]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def written_bytes(process: int) -> int:
    """Return what `process` and its ended children have sent towards the disk."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return _field(lines, "write_bytes:")


def _process_ticks(process: int) -> tuple[int, int]:
    """Return user and system ticks of `process` and its ended children."""
    fields = _stat_fields(process)
    if not fields:
        return 0, 0
    user, system, children_user, children_system = map(int, fields[11:15])
    return user + children_user, system + children_system


def _stat_fields(process: int) -> list[str]:
    """Return the fields after the name of the program, which may hold anything; none if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _free_bytes() -> int:
    return 1024 * _field(Path("/proc/meminfo").read_text().splitlines(), "MemFree:")


def _memory(name: str) -> int:
    return 1024 * _field(Path("/proc/self/status").read_text().splitlines(), f"{name}:")


def _field(lines: Iterable[str], label: str) -> int:
    return next(int(line.split()[1]) for line in lines if line.startswith(label))


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
