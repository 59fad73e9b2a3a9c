"""Small file systems of their own, on loop devices, and cutting their power.

Cutting the power is done by the kernel: FS_IOC_SHUTDOWN, which the tests of the file systems themselves
use, ends a file system at once, in the middle of whatever it does. Nothing that it holds in memory reaches
the disk any more, neither data nor journal, and everybody who asks for anything gets EIO. What it had
handed to the disk before stays, so that is a power cut for a disk without a cache of its own. For one
that has a cache the disk itself is a file in another file system, and that one is shut down: of what the
disk accepted, only what it was told to flush is left, and of the rest a random part.

Device mapper (dm-log-writes) would do the same from below, but few kernels of test machines have it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEBIBYTE = 1 << 20
_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = 2
_START_WRITING = 2
_UNMOUNT_SECONDS = 10.0
# Of each piece of the disk's cache, this part survives.
_PIECE_BYTES = 64 << 10
_SURVIVES = 0.3


def run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class FileSystem:
    """A file system of the `kind` that mkfs knows, in a sparse file, to be mounted at `place`."""

    def __init__(self, kind: str, image: Path, place: Path, size_bytes: int, *options: str) -> None:
        self.image = image
        self.place = place
        place.mkdir()
        image.touch()
        os.truncate(image, size_bytes)
        run(f"mkfs.{kind}", "-q", *options, image)

    def mount(self) -> None:
        run("mount", "-o", "loop", self.image, self.place)

    def remount(self, options: str) -> None:
        run("mount", "-o", f"remount,{options}", self.place)

    def unmount(self) -> None:
        unmount(self.place)

    def shut_down(self) -> None:
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)


class Disk:
    """A disk, with a cache that a power cut empties, and the file system on it."""

    def __init__(self, kind: str, place: Path) -> None:
        # The least that mkfs.xfs accepts; ext4 is as good with less.
        size = (320 if kind == "xfs" else 48) * MEBIBYTE
        self.platter = FileSystem("ext4", place / "memory/platter", place / "platter", size + 32 * MEBIBYTE)
        self.platter.mount()
        self.content = FileSystem(kind, place / "platter/disk", place / "disk", size)
        self.content.mount()
        os.sync()

    def cut_power(self, dice: random.Random, *, loses_cache: bool) -> None:
        if not loses_cache:
            self.content.shut_down()
            return
        with self.content.image.open("rb") as cache:
            for start in range(0, self.content.image.stat().st_size, _PIECE_BYTES):
                if dice.random() < _SURVIVES:
                    _write_back(cache.fileno(), start)
            self.platter.shut_down()

    def power_on(self) -> None:
        self.content.unmount()
        self.platter.unmount()
        self.platter.mount()
        self.content.mount()


def _write_back(descriptor: int, start: int) -> None:
    libc = ctypes.CDLL(None)
    libc.sync_file_range(
        descriptor, ctypes.c_int64(start), ctypes.c_int64(_PIECE_BYTES), ctypes.c_uint(_START_WRITING)
    )


@contextmanager
def room_for_disks(place: Path, kind: str) -> Iterator[Path]:
    """Yield a directory for disks whose files lie in memory; skip the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("disks are mounted for this test, and only root may mount")
    for tool in ("mkfs.ext4", f"mkfs.{kind}", "losetup"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to make a disk")
    memory = place / "memory"
    memory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(memory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.splitlines()[0]}")
    try:
        try_loop_device(memory / "try", place / "try", kind)
        yield place
    finally:
        for name in ("disk", "platter", "try", "memory"):
            if os.path.ismount(place / name):
                unmount(place / name)


def try_loop_device(image: Path, place: Path, kind: str) -> None:
    tried = FileSystem(kind, image, place, 320 * MEBIBYTE)
    command = ["mount", "-o", "loop", str(image), str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.splitlines()[0]}")
    tried.unmount()
    image.unlink()


def unmount(place: Path) -> None:
    """The loop device lets go of the file below a moment after; until then that one is in use."""
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline:
            # At least nothing may stay mounted.
            run("umount", "--lazy", place)
            pytest.fail(f"{place} cannot be unmounted")
        time.sleep(0.005)
