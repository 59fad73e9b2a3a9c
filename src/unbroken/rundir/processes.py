"""Who a process is: ids that stay unique over reuse of numbers and over reboots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process on a host. `start_ticks` and `boot_id` tell it from later ones with the same number.

    `namespace` is where that number counts, 0 if it is not known: containers share a boot, not the numbers.
    """

    host: str
    process_id: int
    start_ticks: int
    boot_id: str
    namespace: int = field(default=0, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "process_id": self.process_id,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
            "namespace": self.namespace,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessIdentity | None:
        """Return the identity written in `value`, or None if a field is missing or of another type."""
        try:
            return cls(
                host=str(value["host"]),
                process_id=int(value["process_id"]),
                start_ticks=int(value["start_ticks"]),
                boot_id=str(value["boot_id"]),
                namespace=int(value.get("namespace", 0)),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """One reading of a process; `state` is the letter of proc(5), "D" cannot be ended, "Z" is a zombie."""

    process_id: int
    parent_id: int
    name: str
    state: str
    start_ticks: int

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.name}, state {self.state})"


def read_stat(process_id: int) -> ProcessStat | None:
    """Return what the kernel says of a process of this host, or None if there is none."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may hold anything, brackets too; `rest` begins with field 3.
    start, _, rest = text.rpartition(")")
    fields = rest.split()
    return ProcessStat(
        process_id=process_id,
        parent_id=int(fields[1]),
        name=start.partition("(")[2],
        state=fields[0],
        start_ticks=int(fields[19]),
    )


def everyone() -> Iterator[ProcessStat]:
    """Yield one reading of each process of this host."""
    for entry in os.listdir("/proc"):
        found = read_stat(int(entry)) if entry.isdecimal() else None
        if found is not None:
            yield found


def boot_id() -> str:
    """Return the kernel's id of this boot, or an empty string where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identify(process_id: int) -> ProcessIdentity | None:
    """Return the identity of a process of this host, or None if it is gone or a zombie."""
    found = read_stat(process_id)
    if found is None or found.state in "ZX":
        return None
    return ProcessIdentity(
        host=os.uname().nodename,
        process_id=process_id,
        start_ticks=found.start_ticks,
        boot_id=boot_id(),
        namespace=_namespace(),
    )


def identify_self() -> ProcessIdentity:
    """Return the identity of this process."""
    found = identify(os.getpid())
    if found is None:
        # No /proc (macOS): the number alone must do.
        return ProcessIdentity(
            host=os.uname().nodename, process_id=os.getpid(), start_ticks=0, boot_id=boot_id()
        )
    return found


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Tell whether that very process runs; None if it is of another host and cannot be asked."""
    if not _is_of_here(identity):
        return None
    found = identify(identity.process_id)
    return found is not None and is_same(found, identity)


def is_same(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Tell whether two identities of this host are of one process, also if the host was renamed meanwhile."""
    return one == replace(other, host=one.host) and _is_of_here(one) and _is_of_here(other)


def _is_of_here(identity: ProcessIdentity) -> bool:
    if identity.host == os.uname().nodename:
        return True
    is_same_kernel = identity.boot_id != "" and identity.boot_id == boot_id()
    return is_same_kernel and identity.namespace != 0 and identity.namespace == _namespace()


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
