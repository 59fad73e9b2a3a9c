"""Where the control groups of a process lie, by what the kernel says of groups and mounts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.storage.mounts import unescaped

UNIFIED = "unified"
_PROC = Path("/proc")
_OF_USE = {"memory", "freezer"}
# How the list of mounts writes what would break its lines apart, such as blanks.


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group in `directory`, of the hierarchy that is mounted at `mount`."""

    directory: Path
    mount: Path

    def upwards(self) -> Iterator[Path]:
        """Yield the directories of the group and of those above it: what binds one binds all below."""
        for directory in (self.directory, *self.directory.parents):
            if directory.is_relative_to(self.mount):
                yield directory


def control_groups(process_id: int | None = None, *, proc: Path = _PROC) -> dict[str, ControlGroup]:
    """Return the groups that a process is in, this one if no other is named.

    The keys are `unified` for version 2, and `memory` and `freezer` for those of version 1. What cannot be
    read is left out.
    """
    try:
        groups = (proc / str(process_id or "self") / "cgroup").read_bytes()
        mounts = (proc / "self/mountinfo").read_bytes()
    except OSError:
        return {}
    return find_groups(os.fsdecode(groups), os.fsdecode(mounts))


def find_groups(groups: str, mounts: str) -> dict[str, ControlGroup]:
    """Return what /proc/self/cgroup and /proc/self/mountinfo say, without a look at the directories.

    >>> find_groups("0::/a/b\\n", "9 1 0:5 / /sys/fs/cgroup rw - cgroup2 none rw\\n")["unified"].directory
    PosixPath('/sys/fs/cgroup/a/b')
    """
    inside: dict[str, str] = {}
    for line in filter(None, groups.split("\n")):
        number, controllers, path = line.split(":", 2)
        inside.update(dict.fromkeys(controllers.split(",") if number != "0" else [UNIFIED], path))
    found: dict[str, ControlGroup] = {}
    for line in mounts.split("\n"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        for name in _controllers(kind, options.rpartition(" ")[2]) & inside.keys():
            root, point = map(unescaped, left.split(" ")[3:5])
            mount = Path(point)
            found.setdefault(name, ControlGroup(_below(mount, root, inside[name]), mount))
    return found


def _controllers(kind: str, options: str) -> set[str]:
    if kind == "cgroup2":
        return {UNIFIED}
    return set(options.split(",")) & _OF_USE if kind == "cgroup" else set()


def _below(mount: Path, root: str, path: str) -> Path:
    # In a container the mount may show its own group as the root while the path is the host's.
    is_outside = path == root or not path.startswith(root.rstrip("/") + "/") or ".." in path.split("/")
    return mount if is_outside else mount / path[len(root) :].lstrip("/")
