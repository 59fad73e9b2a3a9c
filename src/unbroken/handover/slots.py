"""A snapshot in shared memory, which its maker may not live to hand over.

A slot is one anonymous memory file (memfd_create(2)): a record in its first page, the image of the
snapshot, and its description in words. The record has a sequence number, which is 0 while the slot
is being filled, and the digest of itself and the words: what a dying process left half done is never
taken for a snapshot.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.checkpoint.container import ShardPlan, parse_header
from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.image import ImagePlan, plan_image
from unbroken.checkpoint.snapshot import Description, Snapshot, copy_into, given_aliases, unwatched
from unbroken.state.table import TensorTable
from unbroken.storage.base import PAGE_BYTES
from unbroken.storage.failures import translated

_MAGIC = b"UNBROKEN-SLOT-01"
# magic, sequence, size of the image, size of the words
_RECORD = struct.Struct("<16sQQQ")
_DIGEST_BYTES = 32
# A guess at the description; what is too little is made up for when it is known.
_WORDS_BYTES = 1 << 16
_WORDS_BYTES_PER_TENSOR = 200
# Linux 5.14: fault all pages in at once.
_MADV_POPULATE_WRITE = 23
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = len(_MAGIC)
_MEMORY = "memory for snapshots"


class _Shard(msgspec.Struct, frozen=True):
    file: str
    start: int
    size_bytes: int
    header_bytes: int


class _Words(msgspec.Struct, frozen=True):
    description: Description
    shards: list[_Shard]
    aliases: dict[str, list[str]]
    unwatched: list[str]


class Slot:
    """The trainer's side: memory for one snapshot, kept from one to the next.

    Raises StorageError, here and when it is filled, if there is no memory to be had.
    """

    def __init__(self) -> None:
        with translated("make", _MEMORY):
            self.descriptor = os.memfd_create("unbroken-snapshot", os.MFD_CLOEXEC)
        self.sequence = 0
        self._map: mmap.mmap | None = None
        self._plan: ImagePlan | None = None

    @property
    def size_bytes(self) -> int:
        """The memory that this slot holds."""
        return 0 if self._map is None else len(self._map)

    def fill(self, description: Description, table: TensorTable, sequence: int) -> None:
        """Copy the state as it is now; the slot is whole when this returns, and not a moment before."""
        plan = self._plan = plan_image(table.sources, self._plan)
        words = msgspec.json.encode(_words(description, plan, table))
        memory = self._reserve(PAGE_BYTES + plan.size_bytes + len(words))
        self.sequence = 0
        _SEQUENCE.pack_into(memory, _SEQUENCE_AT, 0)
        end = PAGE_BYTES + plan.size_bytes
        image = memoryview(memory)[PAGE_BYTES:end]
        copy_into(image, plan, table.sources, file=(self.descriptor, PAGE_BYTES))
        memory[end : end + len(words)] = words
        record = _RECORD.pack(_MAGIC, sequence, plan.size_bytes, len(words))
        seal = digest(record + words).encode()
        memory[_RECORD.size : _RECORD.size + _DIGEST_BYTES] = seal
        memory[: _RECORD.size] = _RECORD.pack(_MAGIC, 0, plan.size_bytes, len(words))
        # Last of all: from here on it is a snapshot.
        _SEQUENCE.pack_into(memory, _SEQUENCE_AT, sequence)
        self.sequence = sequence

    def needs(self, table: TensorTable) -> int:
        """Return about how many bytes of memory a state like this one takes."""
        plan = self._plan = plan_image(table.sources, self._plan)
        return PAGE_BYTES + plan.size_bytes + _WORDS_BYTES + _WORDS_BYTES_PER_TENSOR * len(table.sources)

    def prepare(self, table: TensorTable) -> None:
        """Reserve what a state like this one needs; whoever touches it first has it filled with zeros."""
        self._reserve(self.needs(table))

    def forget(self) -> None:
        """Let what is in the slot be no snapshot any more, for whoever looks at it."""
        self.sequence = 0
        if self._map is not None:
            _SEQUENCE.pack_into(self._map, _SEQUENCE_AT, 0)

    def close(self) -> None:
        """Give the memory back, as far as this process holds it."""
        os.close(self.descriptor)
        self._map = self._plan = None

    def _reserve(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            # Some room, so that a growing journal of numbers in the words does not move everything.
            size = -(-(size + size // 64) // PAGE_BYTES) * PAGE_BYTES
            with translated("enlarge", _MEMORY):
                os.ftruncate(self.descriptor, size)
                self._map = mmap.mmap(self.descriptor, size)
        return self._map


@dataclass(frozen=True, slots=True)
class Filled:
    """A whole snapshot found in a slot."""

    sequence: int
    snapshot: Snapshot


class SlotReader:
    """The reader's side, in another process or in this one: looks at the slot of `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._plans: dict[str, ShardPlan] = {}

    def sequence(self) -> int:
        """Return the number of the snapshot in the slot, or 0 if there is no whole one."""
        found = self._record()
        return 0 if found is None else found[0]

    def populate(self) -> None:
        """Have the kernel fill the memory of the slot with zeros now, which takes a second for each GB.

        Only where nothing is in it yet; done here, the trainer is spared most of it at its first fill.
        """
        view = self._view()
        if self._map is not None and len(view):
            with suppress(OSError):
                self._map.madvise(_MADV_POPULATE_WRITE)

    def read(self) -> Filled | None:
        """Return the snapshot, whose images are the shared memory itself; None if there is no whole one."""
        found = self._record()
        if found is None:
            return None
        sequence, image, encoded = found
        words = msgspec.json.decode(encoded, type=_Words)
        images = {shard.file: image[shard.start :][: shard.size_bytes] for shard in words.shards}
        plans = [self._shard_plan(shard, images[shard.file]) for shard in words.shards]
        snapshot = Snapshot(
            description=words.description,
            plans=plans,
            images=images,
            aliases=words.aliases,
            unwatched=frozenset(words.unwatched),
        )
        return Filled(sequence, snapshot)

    def _record(self) -> tuple[int, memoryview, memoryview] | None:
        memory = self._view()
        if len(memory) < PAGE_BYTES:
            return None
        magic, sequence, image_size, words_size = _RECORD.unpack_from(memory)
        end = PAGE_BYTES + image_size
        if magic != _MAGIC or sequence == 0 or end + words_size > len(memory):
            return None
        words = memory[end : end + words_size]
        seal = bytes(memory[_RECORD.size : _RECORD.size + _DIGEST_BYTES])
        if digest(bytes(memory[: _RECORD.size]) + bytes(words)).encode() != seal:
            return None
        return sequence, memory[PAGE_BYTES:end], words

    def _view(self) -> memoryview:
        size = os.fstat(self._descriptor).st_size
        if not size:
            return memoryview(b"")
        if self._map is None or len(self._map) != size:
            # Writable, though nothing is written: direct I/O asks for the address of the memory.
            with translated("look at", _MEMORY):
                self._map = mmap.mmap(self._descriptor, size)
        return memoryview(self._map)

    def _shard_plan(self, shard: _Shard, image: memoryview) -> ShardPlan:
        header = bytes(image[: shard.header_bytes])
        known = self._plans.get(shard.file)
        if known is None or known.header != header:
            known = self._plans[shard.file] = ShardPlan(
                file=shard.file,
                header=header,
                placements=parse_header(header, shard.file),
                size_bytes=shard.size_bytes,
            )
        return known


def _words(description: Description, plan: ImagePlan, table: TensorTable) -> Any:
    shards = [
        _Shard(shard.file, plan.starts[shard.file], shard.size_bytes, len(shard.header))
        for shard in plan.shards
    ]
    return _Words(description, shards, given_aliases(table), unwatched(table))
