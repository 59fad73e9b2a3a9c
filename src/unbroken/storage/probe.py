"""What a directory's file system can do, tried out: what a run that saves there has to rely on.

Everything is tried below a temporary directory, which is removed again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.storage.failures import translated
from unbroken.storage.mounts import file_system

_SYNCS = 5
_SYNCED_BYTES = 4096
# Another process, as a second run would be; what it finds is its exit code.
_TRY_LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(10)
sys.exit(11)
"""
_WAS_REFUSED, _WAS_GIVEN = 10, 11
_LOCK_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found out about the file system of a directory.

    `file_system` is its type ("ext4", "nfs4"), "" where the kernel does not say. `sync_seconds` is the
    median for 4 KiB, synced. `locks` says whether a lock keeps another process out: "hold", "absent" (there
    are none), or "ignored" (both processes have it). `replaces_full_directories` is what a rename must never
    do. `clock_ahead_seconds` is how far the clock that dates files is ahead of this machine's.
    """

    directory: str
    file_system: str
    free_bytes: int
    total_bytes: int
    free_files: int | None
    sync_seconds: float
    has_direct_io: bool
    has_links: bool
    locks: str
    replaces_full_directories: bool
    clock_ahead_seconds: float


def probe(directory: Path) -> Probe:
    """Try out the file system of `directory`. Raises StorageError if nothing can be written there."""
    with translated("probe", str(directory)), _workplace(directory) as place:
        sizes = os.statvfs(directory)
        ahead = _clock_ahead(place)
        return Probe(
            directory=str(directory),
            file_system=file_system(directory),
            free_bytes=sizes.f_bavail * sizes.f_frsize,
            total_bytes=sizes.f_blocks * sizes.f_frsize,
            # Some, as btrfs, have no fixed number of files.
            free_files=sizes.f_favail if sizes.f_files else None,
            sync_seconds=_sync_seconds(place),
            has_direct_io=_has_direct_io(place),
            has_links=_has_links(place),
            locks=_locks(place),
            replaces_full_directories=_replaces_full_directories(place),
            clock_ahead_seconds=ahead,
        )


@contextmanager
def _workplace(directory: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{os.getpid()}-", dir=directory))
    try:
        yield place
    finally:
        # What a broken file system keeps is swept by the next start, as what a killed one left.
        shutil.rmtree(place, ignore_errors=True)


def _clock_ahead(place: Path) -> float:
    before = time.time()
    (place / "now").write_bytes(b"now")
    written, after = (place / "now").stat().st_mtime, time.time()
    return max(0.0, written - after) - max(0.0, before - written)


def _sync_seconds(place: Path) -> float:
    taken = []
    with (place / "synced").open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            begun = time.monotonic()
            file.write(os.urandom(_SYNCED_BYTES))
            os.fsync(file.fileno())
            taken.append(time.monotonic() - begun)
    return statistics.median(taken)


def _has_direct_io(place: Path) -> bool:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        os.close(os.open(place / "direct", os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _has_links(place: Path) -> bool:
    (place / "one").write_bytes(b"one")
    try:
        os.link(place / "one", place / "other")
    except OSError:
        return False
    return os.path.samefile(place / "one", place / "other")


def _locks(place: Path) -> str:
    """Return what a lock of this process is to another one. Of the kind that keeps a run to one writer."""
    with (place / "lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return "absent"
        other = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(place / "lock")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOCK_SECONDS,
            check=False,
        )
    if other.returncode not in (_WAS_REFUSED, _WAS_GIVEN):
        raise OSError(errno.EIO, f"a process that asks for a lock ended with {other.returncode}")
    return "hold" if other.returncode == _WAS_REFUSED else "ignored"


def _replaces_full_directories(place: Path) -> bool:
    for name in ("new", "old"):
        (place / name).mkdir()
        (place / name / name).write_bytes(b"kept")
    with suppress(OSError):
        os.rename(place / "new", place / "old")
    return not (place / "old/old").exists()
