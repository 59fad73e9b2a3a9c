"""Real memory groups with a limit, in which the kernel really ends what takes too much."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

MEBIBYTE = 1 << 20
_ROOT = Path("/sys/fs/cgroup/memory")


class Group:
    """A memory cgroup of version 1 with a limit."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes

    def command(self, command: Sequence[str]) -> list[str]:
        """Return `command` so that it, and all that it starts, runs in the group."""
        enter = f'echo $$ > {self.directory / "cgroup.procs"} && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    def used_bytes(self) -> int:
        return int((self.directory / "memory.usage_in_bytes").read_text())

    def cached_bytes(self) -> int:
        return self._value("memory.stat", "total_cache")

    def _value(self, file: str, name: str) -> int:
        lines = (self.directory / file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """Yield a group of its own for this test, or skip it where none can be made."""
    directory = _ROOT / f"unbroken-test-{os.getpid()}-{os.urandom(3).hex()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    try:
        (directory / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield Group(directory, limit_bytes)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            directory.rmdir()
            return
        except OSError:
            # The last process of it is about to be gone.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let nothing else of these tests run out of memory meanwhile: one of the counters is the machine's."""
    with (Path(tempfile.gettempdir()) / "unbroken-out-of-memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
