"""Programs that end processes before the kernel must: systemd-oomd, earlyoom. No kernel counts those."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

_NAMES = ("systemd-oomd", "earlyoom")
# systemd-oomd marks the group whose processes it has ended.
_MARK = "user.oomd_kill"
_ANSWER_SECONDS = 3.0


def find_killer(groups: Sequence[Path], processes: Collection[int], *, started_seconds: float) -> str:
    """Return what such a program says to have done to one of `processes` or `groups`; empty if nothing.

    `started_seconds` is since 1970. It starts a process and waits for it: nothing of an attempt may be
    left.
    """
    for group in groups:
        with suppress(OSError):
            count = os.getxattr(group, _MARK).decode(errors="replace")
            return f"systemd-oomd has ended {count} processes of {group.name}"
    lines = _journal(started_seconds)
    # systemd-oomd may end all of the unit that a group is in, and us with it.
    units = {group.parent.name for group in groups if group.parent.suffix in (".scope", ".service")}
    names = [group.name for group in groups]
    return line_about(lines, groups=[*names, *units], processes=processes)


def line_about(lines: Collection[str], *, groups: Collection[str], processes: Collection[int]) -> str:
    """Return the first line that names one of the groups or processes, or an empty text.

    >>> line_about(["sending SIGTERM to process 71 uid 0 'python'"], groups=[], processes=[7, 71])
    "sending SIGTERM to process 71 uid 0 'python'"
    """
    names = [re.escape(name) for name in groups] + [rf"process {number}\b" for number in processes]
    if not names:
        return ""
    said = re.compile("|".join(names))
    return next((line for line in lines if said.search(line)), "")


def _journal(since: float) -> list[str]:
    program = shutil.which("journalctl")
    if program is None:
        return []
    # Loaded where it is needed: seldom.
    import subprocess

    whose = [f"--identifier={name}" for name in _NAMES]
    command = [program, "--quiet", "--no-pager", "--output=cat", f"--since=@{since:.0f}", *whose]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
