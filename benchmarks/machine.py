"""What the numbers were measured on: facts that explain them, no names and no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers import ENTRIES

REPOSITORY = Path(__file__).resolve().parents[1]


def facts(directory: Path) -> dict[str, Any]:
    """Return the facts about this machine, the file system of `directory` and the versions compared."""
    memory_kib = int(_line_of("/proc/meminfo", "MemTotal").split()[0])
    versions = {entry.package: entry.version() for entry in ENTRIES.values() if entry.package}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "cpu": _line_of("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20),
        "file_system": _file_system(directory),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "versions": {package: found or "not installed" for package, found in versions.items()},
    }


def one_line(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return (
        f"{found['date']}, commit {found['commit']}: {found['cpu']}, {found['cores']} cores, "
        f"{found['memory_gib']} GiB, {found['file_system']}, Linux {found['kernel']}, "
        f"Python {found['python']}; {versions}"
    )


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`."""
    place, best, kind = directory.resolve(), Path("/"), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # The place of the mount is the fifth field; the type is the first after the dash.
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4])
        if place.is_relative_to(mount) and mount.is_relative_to(best):
            best, kind = mount, after.split()[0]
    return kind


def _line_of(path: str, label: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == label:
            return value.strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
