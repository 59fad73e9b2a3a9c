"""A small disk that only this process and its children see; it is gone with them, whatever happens."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unbroken.errors import UnbrokenError

_SIZE_MEGABYTES = 64
_PIECE_BYTES = 1 << 20
# Of sched.h and sys/mount.h.
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_MNT_DETACH = 2


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Have a small file system in memory at the directory `place` meanwhile.

    It needs root, or the right to make a user namespace. Raises UnbrokenError without them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _leave_the_others(libc)
        options = f"size={_SIZE_MEGABYTES}m".encode()
        _call(libc.mount, b"tmpfs", os.fsencode(place), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    except OSError as error:
        raise UnbrokenError(
            f"simulate disk: no small disk can be made here: {error.strerror}",
            hint="run it as root, or where users may make namespaces (`unshare --user true` tells)",
        ) from error
    try:
        yield
    finally:
        libc.umount2(os.fsencode(place), _MNT_DETACH)


def fill(place: Path) -> Path:
    """Write a file to `place` until there is no space left, and return it."""
    path = place / "filler"
    # Without a buffer: what finds no room is not tried again when the file is closed.
    with path.open("wb", buffering=0) as file:
        size = _PIECE_BYTES
        while size:
            try:
                file.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    return path


def _leave_the_others(libc: ctypes.CDLL) -> None:
    """Have mounts of our own from now on; without root by way of a user namespace."""
    user, group = os.getuid(), os.getgid()
    try:
        _call(libc.unshare, _CLONE_NEWNS)
    except PermissionError:
        _call(libc.unshare, _CLONE_NEWNS | _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # What we mount must not show up elsewhere.
    _call(libc.mount, None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def _call(function: ctypes._NamedFuncPointer, *arguments: bytes | int | None) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
