"""A directory of a local or mounted file system as storage.

The durable rename (write beside, fsync the file, rename, fsync the directory) follows what the
POSIX file systems promise and no more; see Pillai et al., "All File Systems Are Not Created Equal"
(OSDI 2014).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.storage.base import TEMPORARY_PREFIX, Buffer, Names, check_key, cut_short, exists, missing

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# One write call takes at most 2 GiB on Linux; smaller pieces also let other threads run in between.
_PIECE_BYTES = 16 << 20


class LocalStorage:
    """Keeps each value as a file below `root`, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with _translated("write", key):
            self._make_directory(path.parent)
            temporary = path.parent / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"
            try:
                size = _write_file(temporary, chunks)
                os.replace(temporary, path)
            except BaseException:
                # The half-written file must not keep a full disk full.
                with suppress(FileNotFoundError):
                    temporary.unlink()
                raise
            _sync_directory(path.parent)
        return size

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with _translated("stage", key):
            self._make_directory(path.parent)
            if path.exists():
                raise exists("stage", key)
            return _write_file(path, chunks)

    def move(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)
        with _translated("move", f"{source} -> {target}"):
            if not os.path.lexists(old):
                raise missing("move", source)
            # rename(2) would replace an empty directory or a file without a word.
            if os.path.lexists(new):
                raise exists("move", target)
            if old.is_dir():
                # The entries of the tree must be durable before its name is.
                _sync_tree(old)
            self._make_directory(new.parent)
            os.rename(old, new)
            _sync_directory(new.parent)
            if old.parent != new.parent:
                _sync_directory(old.parent)

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        path = self._path(key)
        with _translated("read", key), path.open("rb", buffering=0) as file:
            expected = os.fstat(file.fileno()).st_size - start if size_bytes is None else size_bytes
            value = bytearray(max(expected, 0))
            file.seek(start)
            view, found = memoryview(value), 0
            while found < expected:
                count = file.readinto(view[found : found + _PIECE_BYTES])
                if not count:
                    raise cut_short(key, expected, found)
                found += count
            return value

    def size(self, key: str) -> int | None:
        path = self._path(key)
        with _translated("size", key):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if path.is_dir() else found.st_size

    def list(self, prefix: str = "") -> Names:
        path = self._path(prefix) if prefix else self.root
        with _translated("list", prefix or "."):
            try:
                return sorted(name for name in os.listdir(path) if not name.startswith(TEMPORARY_PREFIX))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated("delete", key):
            if not os.path.lexists(path):
                return
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                # Renamed first: a reader never meets half a tree, and a crash leaves a hidden name only.
                doomed = path.parent / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"
                os.rename(path, doomed)
                _sync_directory(path.parent)
                _remove_tree(doomed)
            _sync_directory(path.parent)

    def sweep(self, prefix: str = "") -> Names:
        """Remove what crashed writes and deletes left directly below `prefix`; return the names.

        Only for the single writer of that prefix: another one's temporary files look the same.
        """
        path = self._path(prefix) if prefix else self.root
        with _translated("sweep", prefix or "."):
            names = sorted(os.listdir(path)) if path.is_dir() else []
            left = [name for name in names if name.startswith(TEMPORARY_PREFIX)]
            for name in left:
                if (path / name).is_dir():
                    _remove_tree(path / name)
                else:
                    (path / name).unlink()
            return left

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
            _sync_directory(path.parent)


@contextmanager
def _translated(operation: str, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{operation} {key}: {error.strerror or error}"
        if error.errno in _FULL:
            raise StorageFullError(reason, hint="free space or inodes on that disk, then retry") from error
        if error.errno in _DENIED:
            raise StorageDeniedError(
                reason, hint="check the owner, the rights and the mount of that directory"
            ) from error
        if error.errno == errno.ENOENT:
            raise missing(operation, key) from error
        raise StorageError(reason, hint="check the disk and the mount, then retry") from error


def _write_file(path: Path, chunks: Iterable[Buffer]) -> int:
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), _PIECE_BYTES):
                size += _write_all(descriptor, view[start : start + _PIECE_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def _write_all(descriptor: int, view: memoryview) -> int:
    written = 0
    while written < len(view):
        written += os.write(descriptor, view[written:])
    return written


def _remove_tree(path: Path) -> None:
    # Loaded here: looking at checkpoints must start fast, and never removes any.
    from shutil import rmtree

    rmtree(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    for directory, _, _ in os.walk(path, topdown=False):
        _sync_directory(Path(directory))
