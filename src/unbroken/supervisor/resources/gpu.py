"""What the GPUs of this machine do, as NVML tells it: in a process of its own, which may be given up.

A driver in trouble lets its callers wait for ever, and not even a signal ends them. So neither the
supervisor nor a command calls it: `python -m unbroken.supervisor.resources.gpu` does, and answers each
line on stdin by one of JSON.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from unbroken.supervisor.nvml import may_have_gpus

_ANSWER_SECONDS = 5.0


class GpuReader:
    """Asks for the GPUs that this environment shows to a program; the process ends with `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = not may_have_gpus()
        self._last_answer: list[dict[str, Any]] | None = None

    def read(self, *, timeout_seconds: float = _ANSWER_SECONDS) -> list[dict[str, Any]] | None:
        """Return what each GPU does, or None where there are none, or no module `pynvml`.

        Fields: `index`, `name`, `utilization` (0 to 1), `memory_bytes` and `memory_total_bytes`, `problem`;
        None for what it does not tell. A driver that does not answer is asked no more, and is one entry with
        only a problem from then on.
        """
        if self._is_given_up:
            return self._last_answer
        process = self._process = self._process or _start()
        assert process.stdin is not None, "asked for a pipe"
        assert process.stdout is not None, "asked for a pipe"
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
        line = _line(process.stdout, timeout_seconds)
        if line is None:
            self.close()
            self._is_given_up = True
            problem = f"the driver has not answered within {timeout_seconds:g} s"
            self._last_answer = [_entry(problem=problem)]
            return self._last_answer
        answer: list[dict[str, Any]] | None = json.loads(line) if line else None
        if answer is None:
            self.close()
            self._is_given_up = True
        return answer

    def close(self) -> None:
        """End the process, as far as it lets itself be ended."""
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            # One that waits for the driver stays, until that answers.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None


def visible(count: int, uuids: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Return which of `count` GPUs CUDA_VISIBLE_DEVICES shows: all, if it does not say so by numbers or ids.

    >>> visible(4, ["GPU-aa", "GPU-ab", "GPU-b", "GPU-c"], {"CUDA_VISIBLE_DEVICES": "2,GPU-aa"})
    [0, 2]
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(count))
    found = set()
    for word in (word.strip() for word in wanted.split(",") if word.strip()):
        if word.isdecimal() and int(word) < count:
            found.add(int(word))
        elif word.startswith("GPU-"):
            found |= {index for index, uuid in enumerate(uuids) if uuid.startswith(word)}
        elif word.startswith("MIG-"):
            return list(range(count))
    return sorted(found)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "unbroken.supervisor.resources.gpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        # A Ctrl-C is for whoever asks.
        start_new_session=True,
    )


def _line(pipe: IO[bytes], timeout_seconds: float) -> bytes | None:
    """Return a line, empty at the end of it all, or None if there is none in time."""
    until = time.monotonic() + timeout_seconds
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not selector.select(max(0.0, until - time.monotonic())):
                return None
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return b""
            found += piece
    return found


def _entry(**known: Any) -> dict[str, Any]:
    names = ("index", "name", "utilization", "memory_bytes", "memory_total_bytes", "problem")
    return {**dict.fromkeys(names), **known}


def _answer(nvml: Any, indices: Iterable[int]) -> list[dict[str, Any]]:
    found = []
    for index in indices:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
            entry = _entry(
                index=index,
                name=name.decode() if isinstance(name, bytes) else name,
                memory_bytes=int(memory.used),
                memory_total_bytes=int(memory.total),
            )
            # A card that is split into several has none.
            with suppress(nvml.NVMLError):
                entry["utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError as error:
            entry = _entry(index=index, problem=str(error))
        found.append(entry)
    return found


def main() -> int:
    """Answer until stdin ends; "null" if there is nothing to ask."""
    try:
        import pynvml as nvml
    except ImportError:
        print("null", flush=True)
        return 0
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        uuids = [_uuid(nvml, index) for index in range(count)]
    except nvml.NVMLError:
        print("null", flush=True)
        return 0
    indices = visible(count, uuids, os.environ)
    for _ in sys.stdin:
        print(json.dumps(_answer(nvml, indices)), flush=True)
    return 0


def _uuid(nvml: Any, index: int) -> str:
    try:
        found = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


if __name__ == "__main__":
    sys.exit(main())
