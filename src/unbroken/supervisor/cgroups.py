"""Which control groups this process is in, and the counters of the kernel's memory killer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from unbroken.rundir.control_groups import control_groups
from unbroken.supervisor.judging.verdict import OomKills

# The group of the supervisor in its unit of systemd: where memory is counted below, version 2 allows no
# processes beside the groups.
SUPERVISOR_GROUP = "unbroken-supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGroups:
    """The directories of the groups we are in, None where there is no such hierarchy.

    `unified` is of version 2, `memory` and `freezer` are of version 1.
    """

    unified: Path | None = None
    memory: Path | None = None
    freezer: Path | None = None


def own_groups() -> OwnGroups:
    """Return the groups that this process is in."""
    found = control_groups()
    return OwnGroups(**{name: group.directory for name, group in found.items()})


def read_oom_kills(attempt: int | None = None) -> OomKills:
    """Return the counters of processes ended for want of memory, with that of an attempt's own group."""
    group = own_groups()
    return OomKills(
        machine=_counter(Path("/proc/vmstat"), "oom_kill"),
        own_group=group_oom_kills(group.memory or group.unified),
        attempt=attempt,
    )


def new_oom_kills(before: OomKills, after: OomKills) -> OomKills:
    """Return what was counted between two readings; an attempt's own group is as new as the attempt.

    >>> new_oom_kills(OomKills(machine=3), OomKills(machine=5, own_group=1, attempt=1))
    OomKills(machine=2, own_group=None, attempt=1)
    """
    return OomKills(
        machine=_difference(before.machine, after.machine),
        own_group=_difference(before.own_group, after.own_group),
        attempt=after.attempt,
    )


def group_oom_kills(directory: Path | None) -> int | None:
    """Return how many processes of the group, and of those below it, the kernel ended for memory."""
    if directory is None:
        return None
    # Version 1 counts a victim in its own group only, version 2 in those above it too.
    counts = [_counter(path / "memory.oom_control", "oom_kill") for path in subtree(directory)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else _counter(directory / "memory.events", "oom_kill")


def subtree(directory: Path) -> list[Path]:
    """Return the directories of a group and of those below it, the lowest last."""
    return [directory, *sorted(path for path in _inner(directory) if path.is_dir())]


def _inner(directory: Path) -> list[Path]:
    found = []
    for parent, names, _ in os.walk(directory):
        found += [Path(parent, name) for name in names]
    return found


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
    # Smaller than before, it is another counter: of another group, or of another boot.
    return None if before is None or after is None or after < before else after - before
