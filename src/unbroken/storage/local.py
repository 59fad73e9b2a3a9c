"""A directory of a local or mounted file system as storage.

The durable rename (write beside, fsync the file, rename, fsync the directory) follows what the
POSIX file systems promise and no more; see Pillai et al., "All File Systems Are Not Created Equal"
(OSDI 2014).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unbroken.storage.base import (
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

# Other file systems have no links, allow no more of them, or not to there: then the bytes are copied.
_PIECE_BYTES = 16 << 20
_NO_LINK = {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStorage:
    """Keeps each value as a file below `root`, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with translated("write", key):
            self._make_directory(path.parent)
            temporary = path.parent / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"
            try:
                size = _write_file(temporary, chunks)
                os.replace(temporary, path)
            except BaseException:
                with suppress(FileNotFoundError):
                    temporary.unlink()
                raise
            sync_directory(path.parent)
        return size

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(key)
        with translated("stage", key):
            self._make_directory(path.parent)
            try:
                return _write_file(path, chunks)
            except FileExistsError:
                raise exists("stage", key) from None

    def copy(self, source: str, target: str) -> int:
        old, new = self._path(source), self._path(target)
        with translated("copy", f"{source} -> {target}"):
            self._make_directory(new.parent)
            try:
                os.link(old, new, follow_symlinks=False)
                return 0
            except FileExistsError:
                raise exists("copy", target) from None
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
        return self.stage(target, _pieces(old))

    def move(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)
        with translated("move", f"{source} -> {target}"):
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
            sync_directory(new.parent)
            if old.parent != new.parent:
                sync_directory(old.parent)

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        path = self._path(key)
        with translated("read", key):
            expected = path.stat().st_size - start if size_bytes is None else size_bytes
        value = bytearray(max(expected, 0))
        self.read_into(key, start, memoryview(value))
        return value

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        with translated("read", key):
            found = _read_into(self._path(key), start, target)
        if found < len(target):
            raise cut_short(key, len(target), found)

    def size(self, key: str) -> int | None:
        path = self._path(key)
        with translated("size", key):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if path.is_dir() else found.st_size

    def list(self, prefix: str = "") -> Names:
        path = self._path(prefix) if prefix else self.root
        with translated("list", prefix or "."):
            try:
                return sorted(name for name in os.listdir(path) if not name.startswith(TEMPORARY_PREFIX))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translated("delete", key):
            if not os.path.lexists(path):
                return
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                # Renamed first: a reader never meets half a tree, and a crash leaves a hidden name only.
                doomed = path.parent / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"
                os.rename(path, doomed)
                sync_directory(path.parent)
                _remove_tree(doomed)
            sync_directory(path.parent)

    def sweep(self, prefix: str = "") -> Names:
        """Remove what crashed writes and deletes left directly below `prefix`; return the names.

        Only for the single writer of that prefix: another one's temporary files look the same.
        """
        path = self._path(prefix) if prefix else self.root
        with translated("sweep", prefix or "."):
            names = sorted(os.listdir(path)) if path.is_dir() else []
            left = [name for name in names if name.startswith(TEMPORARY_PREFIX)]
            for name in left:
                if (path / name).is_dir():
                    _remove_tree(path / name)
                else:
                    (path / name).unlink()
            return left

    def space(self) -> Space | None:
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        with translated("look at the space of", str(self.root)):
            found = os.statvfs(place)
        # Some file systems (btrfs, many network ones) make inodes as they need them, and say 0.
        inodes = found.f_favail if found.f_files else None
        return Space(free_bytes=found.f_bavail * found.f_frsize, free_files=inodes)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
            sync_directory(path.parent)


def _write_file(path: Path, chunks: Iterable[Buffer]) -> int:
    # Loaded here: looking at checkpoints must start fast, and writes nothing.
    from unbroken.storage.bulk import write_file

    return write_file(path, chunks)


def _read_into(path: Path, start: int, target: memoryview) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = 0
        # One call returns at most 2 GiB.
        while found < len(target):
            count = os.preadv(descriptor, [target[found:]], start + found)
            if count == 0:
                break
            found += count
        return found
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    # Loaded here for the same reason.
    from shutil import rmtree

    rmtree(path)


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    for directory, _, _ in os.walk(path, topdown=False):
        sync_directory(Path(directory))


def _pieces(path: Path) -> Iterable[Buffer]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
