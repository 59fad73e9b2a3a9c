from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.rundir.processes import read_stat

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopting() -> Iterator[None]:
    """What outlives a trainer becomes a child of this process: it can be waited for, and nothing stays."""
    libc = ctypes.CDLL(None)
    before = children()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    try:
        yield
        left = children() - before
        while strays := children() - before:
            for stray in strays:
                os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, 0)
        assert left == set()
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)


def children() -> set[int]:
    stats = [read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()]
    return {stat.process_id for stat in stats if stat is not None and stat.parent_id == os.getpid()}


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where one can be mounted, for what writes very often."""
    place = tmp_path / "quick"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield place
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
