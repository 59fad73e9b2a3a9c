"""Moving many bytes between memory and a file: large aligned pieces, several threads, direct I/O.

Direct I/O (O_DIRECT) spares the copy into the page cache and its cost in CPU time, which training
wants; it needs pages, aligned in memory and in the file, and not every file system has it. What
is not aligned, and what a file system refuses, goes through the page cache. See the decision record on
the writer for the numbers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from unbroken.storage.base import BULK_BYTES, PAGE_BYTES, Buffer
from unbroken.storage.parallel import share

_PIECE_BYTES = 8 << 20
_HUGE_PAGE_BYTES = 2 << 20
# Not the default of mmap: memory that may be shared is in small pages on most kernels.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_THREADS = 4
# IOV_MAX: the pieces of memory that one call takes.
MOST_GATHERED = 1024
# How file systems say that they have no such thing.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS}


def write_open(path: Path, chunks: Iterable[Buffer]) -> tuple[int, int]:
    """Make the file `path` of `chunks`; return its size, and the descriptor that `sync_all` is to be given.

    Raises FileExistsError if it exists. On an error the file is removed again.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        offset = 0
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            _write_view(descriptor, path, view, offset)
            offset += len(view)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, Exception):
            # The half-written file must not keep a full disk full. The first error is the one to tell.
            with suppress(OSError):
                os.unlink(path)
        raise
    return offset, descriptor


def sync_all(descriptors: Sequence[int]) -> None:
    """Make durable what was written on `descriptors`, and close them. Raises the first error.

    On the descriptors that wrote: an error of writing back is told to no other for certain. In threads: a
    journal that is committed for one file takes the others along.
    """
    try:
        share(os.fsync, descriptors, threads=_THREADS)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def gather(descriptor: int, offset: int, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Write the pieces of memory at `addresses` one after the other into a file, from `offset` on.

    One call for at most MOST_GATHERED of them. Returns False if not all were written, for whatever reason.
    """
    if not hasattr(_LIBC, "pwritev"):
        return False
    pieces = array("Q", bytes(16 * len(addresses)))
    pieces[0::2], pieces[1::2] = array("Q", addresses), array("Q", sizes)
    start = ctypes.c_void_p(pieces.buffer_info()[0])
    return bool(_LIBC.pwritev(descriptor, start, len(addresses), ctypes.c_int64(offset)) == sum(sizes))


def _write_view(descriptor: int, path: Path, view: memoryview, offset: int) -> None:
    body = len(view) - len(view) % PAGE_BYTES
    if len(view) < BULK_BYTES or offset % PAGE_BYTES or view.readonly:
        body = 0
    if body:
        _reserve_or_not(descriptor, offset, len(view))
        _write_body(descriptor, path, view[:body], offset)
    _write_all(descriptor, view[body:], offset + body)


def _write_body(descriptor: int, path: Path, body: memoryview, offset: int) -> None:
    direct, buffers = _open_direct(path, os.O_WRONLY), HugeBuffers()
    try:

        def write(start: int) -> None:
            piece = body[start : start + _PIECE_BYTES]
            if direct is None or not _write_direct(direct, piece, offset + start, buffers):
                _write_all(descriptor, piece, offset + start)
                _start_writing_back(descriptor, offset + start, len(piece))

        share(write, range(0, len(body), _PIECE_BYTES), threads=_THREADS)
    finally:
        if direct is not None:
            os.close(direct)


def read_uncached(path: Path, descriptor: int, start: int, target: memoryview, buffers: HugeBuffers) -> int:
    """Fill `target` from the file at `path`, open as `descriptor`, past the page cache; return how far.

    That is less than all of it at the end of the file, and 0 where this is not the way: what is in the cache
    already is copied faster from there, and some file systems have no direct I/O.
    """
    if len(target) < BULK_BYTES or not sys.platform.startswith("linux"):
        return 0
    if _is_cached(descriptor, start, len(target)):
        return 0
    direct = _open_direct(path, os.O_RDONLY)
    if direct is None:
        return 0
    buffer = buffers.take()
    try:
        return _read_direct(direct, start, target, buffer)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return 0
    finally:
        buffers.put(buffer)
        os.close(direct)


def _read_direct(direct: int, start: int, target: memoryview, buffer: memoryview) -> int:
    found = 0
    while found < len(target):
        lead = (start + found) % PAGE_BYTES
        wanted = -(-(lead + len(target) - found) // PAGE_BYTES) * PAGE_BYTES
        count = os.preadv(direct, [buffer[:wanted]], start + found - lead)
        fresh = min(count - lead, len(target) - found)
        if fresh <= 0:
            break
        ctypes.memmove(_address(target) + found, _address(buffer) + lead, fresh)
        found += fresh
    return found


def _is_cached(descriptor: int, start: int, size: int) -> bool:
    """Tell whether most of that range is in the page cache; True where the kernel has no cachestat(2)."""
    asked, told = (ctypes.c_uint64 * 2)(start, size), (ctypes.c_uint64 * 5)()
    if _LIBC.syscall(_CACHESTAT, descriptor, asked, told, 0) != 0:
        return True
    return 2 * told[0] * mmap.PAGESIZE >= size


def reserve(descriptor: int, offset: int, size: int) -> None:
    """Have the file system set blocks aside, or say why it cannot.

    Not `os.posix_fallocate`: where a file system has none, the C library writes into every page instead.
    """
    if not hasattr(_LIBC, "fallocate"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _LIBC.fallocate(descriptor, 0, ctypes.c_int64(offset), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _reserve_or_not(descriptor: int, offset: int, size: int) -> None:
    """Take the blocks at once: they lie together, and a full disk shows before anything is written."""
    try:
        reserve(descriptor, offset, size)
    except OSError as error:
        # A signal may end the wait for many blocks; then they are taken as they are written.
        if error.errno not in {*_UNSUPPORTED, errno.EINTR}:
            raise


def _write_direct(direct: int, piece: memoryview, offset: int, buffers: HugeBuffers) -> bool:
    """Return whether it was written: some file systems refuse only now, or an end that is not aligned."""
    buffer = buffers.take()
    try:
        ctypes.memmove(_address(buffer), _address(piece), len(piece))
        _write_all(direct, buffer[: len(piece)], offset)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    finally:
        buffers.put(buffer)
    return True


class HugeBuffers:
    """Buffers of one piece each, in huge pages; as many as there are threads.

    Shared memory is in small pages on most kernels, and a disk takes them in many small requests: a copy of
    the piece, which costs a tenth of its writing, makes direct I/O a third faster. Reading likewise.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        # Taking from a list and putting back are atomic.
        try:
            return self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, _PIECE_BYTES + _HUGE_PAGE_BYTES, flags=_PRIVATE)
            with suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            view = memoryview(memory)
            start = -_address(view) % _HUGE_PAGE_BYTES
            return view[start : start + _PIECE_BYTES]

    def put(self, buffer: memoryview) -> None:
        self._free.append(buffer)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written : written + _PIECE_BYTES], offset + written)


def _open_direct(path: Path, access: int) -> int | None:
    """Return a second descriptor for direct I/O, or None where the file system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        return os.open(path, access | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise


def _start_writing_back(descriptor: int, offset: int, size: int) -> None:
    """Let the disk begin now instead of at the fsync. Only a hint: its failure shows at the fsync."""
    if hasattr(_LIBC, "sync_file_range"):
        _LIBC.sync_file_range(
            descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE
        )


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2
# Linux 6.5, the same number on all architectures that frameworks run on.
_CACHESTAT = 451
