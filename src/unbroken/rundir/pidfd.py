"""Holding a process that is not our child: its number cannot go to a stranger, and its exit is learned."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from contextlib import suppress
from pathlib import Path

from unbroken.rundir.processes import read_stat

# The ioctl PIDFD_GET_INFO of linux/pidfd.h with its first form of `struct pidfd_info`: mask (8 bytes),
# what is not of interest here, and the exit status in the form of wait(2) (the last 4 bytes).
_GET_INFO = 0xC040FF0B
_INFO_BYTES = 64
_INFO_EXIT = 1 << 3
_FIELD_START, _FIELD_EXIT_CODE = 22, 52


class HeldProcess:
    """The process with that number and start, running or a zombie; ProcessLookupError if there is none.

    Where no pidfd can be had (an old kernel, a filter of calls, too many open files) it is only looked at:
    how it ended may then stay unknown.
    """

    def __init__(self, process_id: int, start_ticks: int) -> None:
        self.process_id = process_id
        self.start_ticks = start_ticks
        self._descriptor = _pidfd(process_id)
        # Looked at after it is held: what has this number now keeps it.
        if self._state() is None:
            self.close()
            raise ProcessLookupError(process_id)

    @property
    def has_ended(self) -> bool:
        if self._descriptor is None:
            return (self._state() or "X") in "ZX"
        watch = select.poll()
        watch.register(self._descriptor, select.POLLIN)
        return bool(watch.poll(0))

    def wait_status(self) -> int | None:
        """Return how it ended, in the form of wait(2), or None if nobody can tell.

        Linux 6.15 and later tell it once the parent has collected it; before that, and on older
        kernels only then, the zombie shows it.
        """
        told = self._told_by_kernel()
        if told is None:
            told = self._shown_by_zombie()
        # Collected between the two looks.
        return self._told_by_kernel() if told is None else told

    def send(self, number: signal.Signals) -> None:
        """Send a signal; it is no error if the process is gone or another user's."""
        with suppress(ProcessLookupError, PermissionError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self._state() is not None:
                os.kill(self.process_id, number)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _state(self) -> str | None:
        found = read_stat(self.process_id)
        return found.state if found is not None and found.start_ticks == self.start_ticks else None

    def _told_by_kernel(self) -> int | None:
        if self._descriptor is None:
            return None
        info = bytearray(_INFO_BYTES)
        struct.pack_into("=Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._descriptor, _GET_INFO, info)
        except OSError:
            # An older kernel, or the process lives.
            return None
        (mask,) = struct.unpack_from("=Q", info, 0)
        (status,) = struct.unpack_from("=i", info, _INFO_BYTES - 4)
        return int(status) if mask & _INFO_EXIT else None

    def _shown_by_zombie(self) -> int | None:
        place = Path(f"/proc/{self.process_id}")
        try:
            owner = place.stat().st_uid
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        # To others than its owner the kernel shows a 0 there, which looks like success.
        if (
            os.geteuid() not in (0, owner)
            or fields[0] != b"Z"
            or int(fields[_FIELD_START - 3]) != self.start_ticks
        ):
            return None
        return int(fields[_FIELD_EXIT_CODE - 3])


def _pidfd(process_id: int) -> int | None:
    # A Python that was built on an old kernel lacks the function.
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    try:
        return os.pidfd_open(process_id)
    except ProcessLookupError:
        raise
    except OSError:
        return None
