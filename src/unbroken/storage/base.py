"""The storage protocol: the seam between checkpoints and the place where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from unbroken.errors import StorageError, UsageError

Buffer: TypeAlias = bytes | bytearray | memoryview
# A method called `list` hides the builtin inside its class.
Names: TypeAlias = list[str]

# Memory, files and direct I/O meet on boundaries of this size.
PAGE_BYTES = 4096
# From here on a value is worth threads and direct I/O; below, one call is faster.
BULK_BYTES = 1 << 20
# Names that no reader is shown: what is being written, or being deleted.
TEMPORARY_PREFIX = ".unbroken-tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may still be written; `free_files` is None where their number has no limit."""

    free_bytes: int
    free_files: int | None


@runtime_checkable
class Storage(Protocol):
    """Keeps values under keys such as `checkpoints/step-00000100/manifest.json`.

    Keys are relative, with `/` between segments. A *tree* is everything below a key. Every method
    raises `StorageError` (or a class below it) that names the operation and the key; after an
    error readers see what was there before or, if only the last wait for the disk failed, what is new.
    """

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Store `chunks` under `key` and return the number of bytes written.

        Atomic and durable: once this returns, every reader sees the whole value, also after a power
        loss; if it fails, readers still see what was there before. Replaces an existing value.
        """
        ...

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Store `chunks` under `key`, inside a tree that `move` will publish later.

        The bytes are durable once `sync` has returned, their name once `move` has; a crash in between
        leaves rubbish below the staging key, nowhere else. Refuses an existing key.
        """
        ...

    def sync(self, tree: str) -> None:
        """Make durable what this object has staged below `tree`; all at once costs less than one by one."""
        ...

    def link(self, source: str, target: str) -> bool:
        """Stage at `target` the value of `source` without writing it again; False where that cannot be.

        Values never change, and deleting one of the two leaves the other whole. Raises and leaves behind
        what `stage` does.
        """
        ...

    def move(self, source: str, target: str) -> None:
        """Rename the tree `source` to `target`: atomic, durable, refused if `target` exists."""
        ...

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        """Return `size_bytes` bytes of the value from `start`, or all the rest of it.

        Raises StorageError when the key is absent or the value ends before the range does.
        """
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the value from `start`; raises what `read` does."""
        ...

    def size(self, key: str) -> int | None:
        """Return the size of the value in bytes, or None if there is no such value."""
        ...

    def list(self, prefix: str = "") -> Names:
        """Return the sorted names directly below `prefix`, values and trees alike."""
        ...

    def delete(self, key: str) -> None:
        """Remove the value or the whole tree at `key`; what is absent is no error.

        A tree vanishes from readers at once, before its values are removed one by one.
        """
        ...

    def space(self) -> Space | None:
        """Return what may still be written here, or None if that has no limit or is not known."""
        ...


def check_key(key: str) -> str:
    """Return `key` if it stays inside the storage; raise UsageError otherwise."""
    if key.startswith("/") or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise UsageError(
            f"storage key {key!r}: expected relative segments joined by '/', without '.' or '..'",
            hint="use keys such as 'checkpoints/step-00000100/manifest.json'",
        )
    return key


def missing(operation: str, key: str) -> StorageError:
    """The error for a key that is not there."""
    return StorageError(f"{operation} {key}: no such value", hint="list the storage to see what it holds")


def exists(operation: str, key: str) -> StorageError:
    """The error for a key that must not be there."""
    return StorageError(f"{operation} {key}: it exists already", hint="move or prune what is there first")


def cut_short(key: str, expected: int, found: int) -> StorageError:
    """The error for a value that ends too early."""
    return StorageError(
        f"read {key}: expected {expected} bytes, found {found}", hint="the file was truncated; verify it"
    )
