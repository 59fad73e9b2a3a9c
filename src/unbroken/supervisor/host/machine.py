"""What is to be seen of this machine before a run goes on here: shared memory, logins, versions, GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unbroken.supervisor import nvml
from unbroken.supervisor.host import systemd

SHARED_MEMORY = Path("/dev") / "shm"
PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
# The names that an environment has its libraries by; those that have another one on the package index.
_LIBRARIES = {name: name for name in ("numpy", "torch", "keras", "jax", "transformers", "lightning")}
_LIBRARIES["tensorflow"] = "tensorflow-cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found on this machine; `versions` are those of libraries beside this `unbroken`.

    `shared_memory_bytes` is the size of /dev/shm, None if there is none. `has_py_spy` tells that py-spy
    is installed, `may_trace` whether it may look into other processes. `ends_with_login` tells that those in
    the background may end with the last login of `user`.
    """

    shared_memory_bytes: int | None
    versions: Mapping[str, str]
    has_gpus: bool
    has_py_spy: bool
    may_trace: bool
    user: str
    ends_with_login: bool


def look() -> Machine:
    """Return what is to be seen here. No framework is imported, and no device woken up."""
    return Machine(
        shared_memory_bytes=_size_of(SHARED_MEMORY),
        versions=_versions(),
        has_gpus=nvml.may_have_gpus(),
        has_py_spy=shutil.which("py-spy") is not None,
        may_trace=os.geteuid() == 0 or _ptrace_scope() == 0,
        user=systemd.user(),
        ends_with_login=systemd.answers() and not systemd.is_lingering(),
    )


def _size_of(place: Path) -> int | None:
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _versions() -> dict[str, str]:
    found = {}
    for name, other in _LIBRARIES.items():
        for distribution in {name: None, other: None}:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _ptrace_scope() -> int:
    try:
        return int(PTRACE.read_text())
    except (OSError, ValueError):
        # A kernel without this limit.
        return 0
