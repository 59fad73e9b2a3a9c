"""Who a process is: ids that stay unique over reuse of numbers and over reboots."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process on a host. `start_ticks` and `boot_id` tell it from later ones with the same number."""

    host: str
    process_id: int
    start_ticks: int
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "process_id": self.process_id,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
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
            )
        except (KeyError, TypeError, ValueError):
            return None


def boot_id() -> str:
    """Return the kernel's id of this boot, or an empty string where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identify(process_id: int) -> ProcessIdentity | None:
    """Return the identity of a process of this host, or None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    # Field 22 of proc(5); two fields stand before the closing bracket.
    return ProcessIdentity(
        host=os.uname().nodename, process_id=process_id, start_ticks=int(fields[19]), boot_id=boot_id()
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
    if identity.host != os.uname().nodename:
        return None
    return identify(identity.process_id) == identity
