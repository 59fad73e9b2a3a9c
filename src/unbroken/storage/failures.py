"""What a failed system call means for the one who asked: which error, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from unbroken.errors import StorageDeniedError, StorageError, StorageFullError

_FULL = {errno.ENOSPC, errno.EDQUOT}
# No rights, a read-only file system, or a file where a directory has to be.
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_MOUNT_ANEW = "the connection to this mount is gone: mount it anew, then retry"
_REMEDIES = {
    errno.ENOENT: "it was never there, or something removed it meanwhile: look at what is there",
    errno.ENOSPC: "free space or inodes on that disk, then retry",
    errno.EDQUOT: "free space within the quota, or have it raised, then retry",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or use another file system",
    errno.EROFS: "mount it for writing; the kernel mounts a damaged disk read-only, so look at its log",
    errno.EIO: "the disk reports an error: look at the kernel's log, and copy the run to another disk",
    errno.EUCLEAN: "this file system is damaged: unmount it, repair it with fsck, then retry",
    errno.ENXIO: "the device is gone: look at the kernel's log and the cables, then mount it anew",
    errno.ENODEV: "the device is gone: look at the kernel's log and the cables, then mount it anew",
    errno.EBUSY: "something else has it in use: see what with `lsof` or `fuser`, then retry",
    errno.ESTALE: "the server of this mount has lost the file: mount it anew, then retry",
    errno.ENOTCONN: _MOUNT_ANEW,
    errno.ESHUTDOWN: _MOUNT_ANEW,
    errno.ETIMEDOUT: "the server of this mount does not answer: look at the network, then retry",
    errno.EMFILE: "too many files are open in this process: raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine: close some, or raise fs.file-max",
    errno.ENOMEM: "free memory on this machine, then retry",
    errno.ENAMETOOLONG: "use a run directory with a shorter path",
    errno.ELOOP: "look at the symbolic links in that path: they form a circle",
}
_CHECK_RIGHTS = "check the owner, the rights and the mount of that directory"
_CHECK_DISK = "check the disk and the mount, then retry"


def failed(operation: str, where: object, error: OSError) -> StorageError:
    """Return the error for a system call that failed in `operation` on the key or path `where`."""
    message = f"{operation} {where}: {error.strerror or error}"
    number = error.errno or 0
    if number in _FULL:
        return StorageFullError(message, hint=_REMEDIES[number])
    if number in _DENIED:
        return StorageDeniedError(message, hint=_REMEDIES.get(number, _CHECK_RIGHTS))
    return StorageError(message, hint=_REMEDIES.get(number, _CHECK_DISK))


@contextmanager
def translated(operation: str, key: str) -> Iterator[None]:
    """Turn the OSErrors of the block into StorageErrors that name the operation and the key."""
    try:
        yield
    except OSError as error:
        raise failed(operation, key, error) from error
