"""What the kernel says, where we may read it: whom it ended for memory, which device failed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress

from unbroken.supervisor.judging.verdict import DeviceError, Victim

_DEVICE = "/dev/kmsg"
_RECORD_BYTES = 8192
_CHOSEN = re.compile(r"oom-kill:.*task_memcg=(?P<group>[^,]*),.*\bpid=(?P<process>\d+)")
_KILLED = re.compile(r"Killed process (?P<process>\d+)[^(]*\((?P<name>.*)\),? total-vm:(?P<sizes>.*)")
_SIZE = re.compile(r"(?:anon|file|shmem)-rss:(\d+)kB")
_XID = re.compile(r"NVRM: Xid \([^)]*\): (?P<code>\d+),(?: pid='?(?P<process>\d+))?")


class KernelLog:
    """Reads what the kernel logs from now on. Empty where that is not allowed, as in most containers."""

    def __init__(self) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(_DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> list[str]:
        """Return the lines since the last call."""
        lines: list[str] = []
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                # The oldest were written over before we came: there are more.
                continue
            except OSError:
                break
            text, _, _ = record.decode(errors="replace").partition("\n")
            lines.append(text.partition(";")[2])
        return lines

    def close(self) -> None:
        """Release it; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def victims(lines: Collection[str], *, group: str | None, processes: Collection[int]) -> tuple[Victim, ...]:
    """Return whom of an attempt the kernel ended for want of memory: in its `group`, or of `processes`.

    Numbers of processes count only where there is no group: in a container those in the log are others'.
    """
    chosen: dict[int, str] = {}
    found = []
    for line in lines:
        choice, kill = _CHOSEN.search(line), _KILLED.search(line)
        if choice is not None:
            chosen[int(choice["process"])] = choice["group"]
        elif kill is not None:
            process_id = int(kill["process"])
            where = chosen.get(process_id, "").split("/")
            if group in where if group is not None else process_id in processes:
                size = sum(int(size) for size in _SIZE.findall(kill["sizes"])) * 1024
                found.append(Victim(process_id=process_id, name=kill["name"], size_bytes=size))
    return tuple(found)


def device_errors(lines: Collection[str]) -> tuple[DeviceError, ...]:
    """Return the errors of NVIDIA's driver, which it numbers (Xid)."""
    found = [(_XID.search(line), line.strip()) for line in lines]
    return tuple(
        DeviceError(
            code=int(xid["code"]), line=line, process_id=int(xid["process"]) if xid["process"] else None
        )
        for xid, line in found
        if xid
    )
