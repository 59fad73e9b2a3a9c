"""A directory of a local or mounted file system as storage.

The durable rename (write beside, fsync the file, rename, fsync the directory) follows what the
POSIX file systems promise and no more; see Pillai et al., "All File Systems Are Not Created Equal"
(OSDI 2014). On a network file system (NFS) a call may fail although it was done, because the answer
was lost and the server was asked again: so what failed is looked at before it is believed.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from unbroken.storage.base import (
    BULK_BYTES,
    TEMPORARY_PREFIX,
    Buffer,
    Names,
    Space,
    check_key,
    cut_short,
    exists,
    missing,
)
from unbroken.storage.failures import translated

_T = TypeVar("_T")

# Other file systems have no links, allow no more of them, or not to there: then there is none.
_NO_LINK = {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Directories cannot be synced there; nothing can be done about it.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
# How much is free is not told there.
_NOT_TOLD = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# A file that a reader has open: on NFS its name stays, as .nfs..., until the reader closes it.
_IN_USE = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}


class LocalStorage:
    """Keeps each value as a file below `root`, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._reachable: set[Path] = set()
        # What is staged and not yet durable, by path: the descriptors that wrote it.
        self._staged: dict[Path, int] = {}
        self._buffers = threading.local()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        # What is staged, and buffers of threads, belong to this process.
        return LocalStorage, (self.root,)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with translated("write", key):
            self._make_directory(path.parent)
            temporary = _hidden_in(path.parent)
            size, descriptor = _write_open(temporary, chunks)
            try:
                _sync_all([descriptor])
                _rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_names(path.parent)
        return size

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with translated("stage", key):
            self._make_directory(path.parent)
            try:
                size, self._staged[path] = _write_open(path, chunks)
            except FileExistsError:
                raise exists("stage", key) from None
        return size

    def sync(self, tree: str) -> None:
        with translated("sync", tree):
            _sync_all(self._take_staged(self._path(tree)))

    def link(self, source: str, target: str) -> bool:
        old, new = self._path(source), self._path(target)
        with translated("link", f"{source} -> {target}"):
            self._make_directory(new.parent)
            if _look_at(new) is not None:
                raise exists("link", target)
            return _link(old, new)

    def move(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)
        with translated("move", f"{source} -> {target}"):
            _sync_all(self._take_staged(old))
            found = _look_at(old)
            if found is None:
                raise missing("move", source)
            # rename(2) would replace a file or an empty directory without a word; never a whole tree,
            # so that a writer who gets in between here destroys nothing.
            if _look_at(new) is not None:
                raise exists("move", target)
            if stat.S_ISDIR(found.st_mode):
                # The entries of the tree must be durable before its name is.
                _sync_tree(old)
            self._make_directory(new.parent)
            try:
                _rename(old, new)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise exists("move", target) from error
                raise
            self._sync_names(new.parent)
            if old.parent != new.parent:
                sync_directory(old.parent)

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        path = self._path(key)
        with translated("read", key):
            expected = _afresh(lambda: os.stat(path)).st_size - start if size_bytes is None else size_bytes
        value = bytearray(max(expected, 0))
        self.read_into(key, start, memoryview(value))
        return value

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        path = self._path(key)
        with translated("read", key):
            found = _afresh(lambda: self._read_into(path, start, target))
        if found < len(target):
            raise cut_short(key, len(target), found)

    def _read_into(self, path: Path, start: int, target: memoryview) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = self._read_uncached(path, descriptor, start, target)
            # One call returns at most 2 GiB.
            while found < len(target):
                count = os.preadv(descriptor, [target[found:]], start + found)
                if count == 0:
                    break
                found += count
            return found
        finally:
            os.close(descriptor)

    def _read_uncached(self, path: Path, descriptor: int, start: int, target: memoryview) -> int:
        if len(target) < BULK_BYTES:
            return 0
        # Loaded here: looking at checkpoints must start fast, and reads little.
        from unbroken.storage.bulk import HugeBuffers, read_uncached

        # One for each thread.
        if not hasattr(self._buffers, "own"):
            self._buffers.own = HugeBuffers()
        return read_uncached(path, descriptor, start, target, self._buffers.own)

    def size(self, key: str) -> int | None:
        path = self._path(key)
        with translated("size", key):
            try:
                found = _afresh(lambda: os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if stat.S_ISDIR(found.st_mode) else found.st_size

    def list(self, prefix: str = "") -> Names:
        with translated("list", prefix or "."):
            return [name for name in self._names(prefix) if not name.startswith(TEMPORARY_PREFIX)]

    def delete(self, key: str) -> None:
        path = self._path(key)
        for descriptor in self._take_staged(path):
            os.close(descriptor)
        with translated("delete", key):
            found = _look_at(path)
            if found is None:
                return
            if not stat.S_ISDIR(found.st_mode):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            else:
                # Renamed first: a reader never meets half a tree, and a crash leaves a hidden name only.
                doomed = _hidden_in(path.parent)
                try:
                    _rename(path, doomed)
                except FileNotFoundError:
                    return
                sync_directory(path.parent)
                _remove(doomed)
            sync_directory(path.parent)

    def sweep(self, prefix: str = "") -> Names:
        """Remove what crashed writes and deletes left directly below `prefix`; return the names.

        What a reader still has open on a network file system stays, for a later sweep. Only for the
        single writer of that prefix: another one's temporary files look the same.
        """
        path = self._path(prefix) if prefix else self.root
        with translated("sweep", prefix or "."):
            left = [name for name in self._names(prefix) if name.startswith(TEMPORARY_PREFIX)]
            return [name for name in left if _remove(path / name)]

    def drop_cached(self, tree: str) -> None:
        """Have the system forget what it remembers of the values directly below `tree`: a read asks the disk.

        As far as it can: what is not durable yet it keeps, and a file system in memory has nothing else.
        """
        path = self._path(tree)
        with translated("drop from memory", tree):
            for name in self._names(tree) if hasattr(os, "posix_fadvise") else ():
                descriptor = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def space(self) -> Space | None:
        with translated("look at the space of", str(self.root)):
            try:
                found = _file_system_of(self.root)
            except OSError as error:
                if error.errno not in _NOT_TOLD:
                    raise
                return None
        # Some file systems (btrfs, many network ones) make inodes as they need them, and say 0.
        inodes = found.f_favail if found.f_files else None
        return Space(free_bytes=found.f_bavail * found.f_frsize, free_files=inodes)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_directory(self, path: Path) -> None:
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                return
        except (FileNotFoundError, NotADirectoryError):
            self._make_directory(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
        # The names below the root are synced when something that is there is published.
        self._reachable.discard(path)
        if self.root not in path.parents:
            sync_directory(path.parent)

    def _take_staged(self, tree: Path) -> Sequence[int]:
        below = [path for path in self._staged if path == tree or tree in path.parents]
        return [self._staged.pop(path) for path in below]

    def _names(self, prefix: str) -> Names:
        path = self._path(prefix) if prefix else self.root
        try:
            return sorted(_afresh(lambda: os.listdir(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _sync_names(self, directory: Path) -> None:
        """Make the names in `directory` durable, and, once, those that lead to it from the root.

        Who made those directories may have died, or failed, before it could sync their names.
        """
        sync_directory(directory)
        while directory != self.root and directory not in self._reachable:
            sync_directory(directory.parent)
            self._reachable.add(directory)
            directory = directory.parent


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _hidden_in(directory: Path) -> Path:
    return directory / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"


def _look_at(path: Path) -> os.stat_result | None:
    """Return what is at `path` itself, or None; an error other than its absence is raised."""
    try:
        return _afresh(lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _file_system_of(path: Path) -> os.statvfs_result:
    """Return what is known of the file system that `path` lies on, or will lie on once it is made."""
    try:
        return os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        if path == path.parent:
            raise
        return _file_system_of(path.parent)


def _afresh(look: Callable[[], _T]) -> _T:
    """Call `look`, and once more if what the system remembered of a file of a server is outdated."""
    try:
        return look()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return look()


def _write_open(path: Path, chunks: Iterable[Buffer]) -> tuple[int, int]:
    # Loaded here: looking at checkpoints must start fast, and writes nothing.
    from unbroken.storage.bulk import write_open

    return write_open(path, chunks)


def _sync_all(descriptors: Sequence[int]) -> None:
    if descriptors:
        # Loaded here for the same reason.
        from unbroken.storage.bulk import sync_all

        sync_all(descriptors)


def _rename(old: Path, new: Path) -> None:
    moved = os.lstat(old)
    try:
        os.rename(old, new)
    except OSError:
        if not _is_at(new, moved):
            raise


def _link(old: Path, new: Path) -> bool:
    """Give `old` the further name `new`; return False where that cannot be."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        if not _is_at(new, os.lstat(old)):
            raise
    return True


def _is_at(path: Path, file: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), file)
    return False


def _remove(path: Path) -> bool:
    """Remove the file or the tree at `path`; return False if something in it is still in use."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            with os.scandir(path) as entries:
                below = [Path(entry.path) for entry in entries]
            # All of them, whatever becomes of the first.
            gone = [_remove(entry) for entry in below]
            if not all(gone):
                return False
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in _IN_USE:
            raise
        return False
    return True


def _sync_tree(path: Path) -> None:
    with os.scandir(path) as entries:
        below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for directory in below:
        _sync_tree(directory)
    sync_directory(path)
