"""What the kernel says of mounted file systems, in /proc/self/mountinfo: see proc_pid_mountinfo(5)."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def unescaped(field: str) -> str:
    """Return a path as it is: in a field of that file spaces and the like are octal numbers."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)


def file_system(directory: Path) -> str:
    """Return the type of the file system that `directory` is on, "" if the kernel does not say."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    return file_system_in(lines, os.path.realpath(directory))


def file_system_in(mounts: list[str], path: str) -> str:
    """Return the type of the file system of an absolute path by the lines of /proc/self/mountinfo.

    See proc_pid_mountinfo(5). Of several mounts at one place the last one is on top.
    """
    best, found = -1, ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = unescaped(fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= best:
            best, found = len(point), after.split(" ")[0]
    return found
