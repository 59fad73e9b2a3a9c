"""What can be read after an attempt ended: memory counters of the kernel, the end of the output."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

from unbroken.supervisor.verdict import OomKills, SeenException

_TAIL_BYTES = 32 * 1024
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
# How our own errors show their hint in a traceback.
_HINT = "hint: "


def read_oom_kills() -> OomKills:
    """Return the counters of processes ended for want of memory: this machine's and our group's."""
    return OomKills(
        machine=_counter(Path("/proc/vmstat"), "oom_kill"),
        own_group=_own_group_counter(),
    )


def new_oom_kills(before: OomKills, after: OomKills) -> OomKills:
    """Return what was counted between two readings.

    >>> new_oom_kills(OomKills(machine=3), OomKills(machine=5, own_group=1))
    OomKills(machine=2, own_group=None)
    """
    return OomKills(
        machine=_difference(before.machine, after.machine),
        own_group=_difference(before.own_group, after.own_group),
    )


def read_tail(path: Path) -> str:
    """Return the last part of the text in `path`, enough for a traceback; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        # Only an explanation is lost with it.
        return ""


def last_exception(output: str) -> SeenException | None:
    """Return the last exception whose traceback Python printed in `output`, or None.

    It need not be what ended the process: a program may print a traceback and go on.
    """
    found: SeenException | None = None
    frame = ""
    for line, below in pairwise([*output.splitlines(), ""]):
        at = _FRAME.fullmatch(line)
        if at is not None:
            within = f" in {at['function']}" if at["function"] else ""
            frame = f"{at['file']}:{at['line']}{within}"
        elif frame and line and not line[0].isspace():
            # The first line after the frames that is not indented names the exception.
            named = _EXCEPTION.fullmatch(line)
            if named is not None:
                found = SeenException(
                    kind=named["kind"],
                    message=named["message"] or "",
                    frame=frame,
                    hint=below.removeprefix(_HINT) if below.startswith(_HINT) else "",
                )
            frame = ""
    return found


def _own_group_counter() -> int | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _counter(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill")
    for line in lines:
        if line.startswith("0::"):
            return _counter(Path(f"/sys/fs/cgroup{line[3:]}/memory.events"), "oom_kill")
    return None


def _counter(path: Path, name: str) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return None


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
