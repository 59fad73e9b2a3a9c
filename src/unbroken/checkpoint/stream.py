"""Reading the tensors of a shard piece by piece, each held against its digest while it is hot.

What is large goes straight to where it belongs and is digested there; what is small is read together
with its neighbours and copied. No thread needs more memory than one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unbroken.checkpoint.digest import digest, hasher
from unbroken.checkpoint.manifest import TensorEntry
from unbroken.storage.base import Storage
from unbroken.storage.parallel import share

_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 1 << 20
_THREADS = 4

Members = list[tuple[str, TensorEntry]]


def stream_tensors(
    storage: Storage,
    key: str,
    members: Mapping[str, TensorEntry],
    into: Mapping[str, memoryview],
    *,
    algorithm: str,
) -> list[str]:
    """Read the tensors `members` of the shard `key` and return those that are not what was saved.

    `algorithm` is that of their digests. The bytes of a tensor go to its memory in `into`, where it has
    one, also when they are damaged.
    Raises StorageError when the storage fails.
    """
    groups = _groups(members)
    reading = _Reading(storage, key, into, groups, algorithm)
    share(reading.read, groups, threads=_THREADS)
    return sorted(reading.damaged)


def _groups(members: Mapping[str, TensorEntry]) -> list[Members]:
    """Small neighbours that fit into one piece together; a larger tensor alone. The largest come first."""
    groups: list[Members] = []
    first, room = 0, -1
    for path, entry in sorted(members.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        is_small = entry.size_bytes <= _SMALL_BYTES
        if not is_small or entry.offset + entry.size_bytes - first > room:
            groups.append([])
            first, room = entry.offset, _PIECE_BYTES if is_small else -1
        groups[-1].append((path, entry))
    return sorted(groups, key=_size, reverse=True)


def _size(group: Members) -> int:
    return group[-1][1].offset + group[-1][1].size_bytes - group[0][1].offset


class _Reading:
    """One pass over a shard by several threads, each with a piece of memory of its own."""

    def __init__(
        self,
        storage: Storage,
        key: str,
        into: Mapping[str, memoryview],
        groups: Sequence[Members],
        algorithm: str,
    ) -> None:
        self.damaged: list[str] = []
        self._storage = storage
        self._key = key
        self._into = into
        self._algorithm = algorithm
        self._pieces: list[memoryview] = []
        self._piece_bytes = min(_PIECE_BYTES, max(map(_size, groups), default=0))

    def read(self, group: Members) -> None:
        """Read the tensors of `group`, and note those that are damaged."""
        # Taking from a list and putting back are atomic: there are never more pieces than threads.
        try:
            piece = self._pieces.pop()
        except IndexError:
            piece = memoryview(bytearray(self._piece_bytes))
        self._read(group, piece)
        self._pieces.append(piece)

    def _read(self, group: Members, piece: memoryview) -> None:
        if _size(group) > _SMALL_BYTES and len(group) == 1:
            path, entry = group[0]
            self._judge(path, entry, self._read_large(entry, self._into.get(path), piece))
            return
        first = group[0][1].offset
        self._storage.read_into(self._key, first, piece[: _size(group)])
        for path, entry in group:
            start = entry.offset - first
            found = piece[start : start + entry.size_bytes]
            self._judge(path, entry, digest(found, self._algorithm))
            target = self._into.get(path)
            if target is not None:
                target[:] = found

    def _read_large(self, entry: TensorEntry, target: memoryview | None, piece: memoryview) -> str:
        found = hasher(self._algorithm)
        for start in range(0, entry.size_bytes, len(piece)):
            size = min(len(piece), entry.size_bytes - start)
            part = piece[:size] if target is None else target[start : start + size]
            self._storage.read_into(self._key, entry.offset + start, part)
            found.update(part)
        return found.hexdigest()

    def _judge(self, path: str, entry: TensorEntry, found: str) -> None:
        if found != entry.digest:
            self.damaged.append(path)
