"""Who holds memory of the GPUs, as NVML tells it; asked in a process of its own, which may be given up.

A process that died may hold its memory for some seconds more, and the next attempt would find none.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from unbroken.rundir.process_tree import spawn_orphan
from unbroken.rundir.processes import read_stat
from unbroken.supervisor.nvml import may_have_gpus
from unbroken.supervisor.records import say

_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_NO_SIZE = 1 << 62
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds `size_bytes` of the memory of the GPU `device`; None if that is not told."""

    device: int
    process_id: int
    size_bytes: int | None = None

    def __str__(self) -> str:
        stat = read_stat(self.process_id)
        name = f" ({stat.name})" if stat is not None else ""
        size = f"{self.size_bytes / 1e6:.0f} MB" if self.size_bytes is not None else "memory"
        return f"process {self.process_id}{name}, {size} of GPU {self.device}"


def wait_for_memory(processes: Collection[int], *, timeout_seconds: float) -> list[Holder]:
    """Return who holds memory of the GPUs once none of the dead `processes` does, or after the time.

    It starts processes and waits for them: nothing of an attempt may be left.
    """
    until = time.monotonic() + timeout_seconds
    while True:
        holders = _ask()
        if holders is None:
            # The next attempt will meet it.
            say(f"the driver of the GPUs has not told within {_ANSWER_SECONDS:g} s who holds their memory")
            return []
        if not any(holder.process_id in processes for holder in holders) or time.monotonic() >= until:
            return holders
        time.sleep(_LOOK_SECONDS)


def _ask() -> list[Holder] | None:
    """Return who holds memory, as far as it is told, or None if there is no answer in time."""
    if not may_have_gpus():
        return []
    answer, to_us = os.pipe()
    try:
        try:
            _start(to_us)
        finally:
            os.close(to_us)
        text = _read(answer)
        return [Holder(**value) for value in json.loads(text)] if text is not None else None
    except (OSError, ValueError, TypeError):
        return []
    finally:
        os.close(answer)


def _start(output: int) -> None:
    """Start the process that asks and writes to `output`: no child of ours, for we could wait for ever."""
    spawn_orphan(
        [sys.executable, "-P", "-m", "unbroken.supervisor.judging.gpu_processes"],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )


def _read(answer: int) -> bytes | None:
    """Return all that is written, or None if that takes too long."""
    until = time.monotonic() + _ANSWER_SECONDS
    found = b""
    while select.select([answer], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(answer, _PIECE_BYTES)
        if not piece:
            return found
        found += piece
    return None


def _holders(nvml: Any) -> list[dict[str, Any]]:
    found = []
    for device in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(device)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            size = process.usedGpuMemory
            # Not told, it is None or the largest number there is.
            is_known = size is not None and size < _NO_SIZE
            found.append(
                {
                    "device": device,
                    "process_id": int(process.pid),
                    "size_bytes": int(size) if is_known else None,
                }
            )
    return found


def main() -> int:
    """Print who holds memory, as JSON, an empty list where nothing can be asked: as an orphan, in a child."""
    if os.fork():
        # Not by the way of Python's end: the child has the rest to do.
        os._exit(0)
    # Once it is given up nobody else ends it.
    signal.alarm(round(2 * _ANSWER_SECONDS))
    try:
        import pynvml as nvml
    except ImportError:
        print("[]")
        return 0
    try:
        nvml.nvmlInit()
        found = _holders(nvml)
    except nvml.NVMLError:
        found = []
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
