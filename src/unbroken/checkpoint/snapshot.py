"""A state in host memory: captured in one pass, then free of the live objects."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from unbroken.checkpoint.container import ShardPlan
from unbroken.checkpoint.image import ImagePlan, Place, plan_image
from unbroken.checkpoint.manifest import PartEntry, Position, RankEntry, Validation
from unbroken.state.paths import part_of
from unbroken.state.table import TensorTable
from unbroken.state.tensors import FLOATING, TensorSource, address_of
from unbroken.storage.bulk import gather
from unbroken.storage.parallel import share

# Copies of more than this go on in pieces on several threads: one core does not fill the memory bus.
_PIECE_BYTES = 8 << 20
_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that a manifest says beyond tensors: who, when, where in training."""

    run_id: str
    step: int
    attempt: int
    created: str
    position: Position
    parts: dict[str, PartEntry]
    parent: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    environment: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    validation: Validation | None = None
    rollbacks: int = 0
    health: Any = None
    ranks: tuple[RankEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A captured state. `images` holds, for each shard, the file's bytes as they will be written.

    `unwatched` are the tensors that may be NaN or infinite.
    """

    description: Description
    plans: list[ShardPlan]
    images: dict[str, memoryview]
    aliases: dict[str, list[str]]
    unwatched: frozenset[str] = frozenset()


class HostBuffers:
    """Memory for one snapshot at a time, kept from save to save.

    Fresh pages cost ten times the copy into them, so the memory is reused; a snapshot is therefore
    valid only until the next capture.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self.plan: ImagePlan | None = None

    def get(self, size: int) -> memoryview:
        """Return `size` bytes of writable, page-aligned memory."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Huge pages make the first copy five times as fast; a kernel without them refuses.
            with suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._map)[:size]


def capture(description: Description, table: TensorTable, buffers: HostBuffers) -> Snapshot:
    """Copy every tensor of `table` into `buffers`; this copy is all that training waits for."""
    plan = buffers.plan = plan_image(table.sources, buffers.plan)
    image = buffers.get(plan.size_bytes)
    copy_into(image, plan, table.sources)
    return Snapshot(
        description=description,
        plans=plan.shards,
        images={shard.file: image[plan.starts[shard.file] :][: shard.size_bytes] for shard in plan.shards},
        aliases=given_aliases(table),
        unwatched=frozenset(unwatched(table)),
    )


def given_aliases(table: TensorTable) -> dict[str, list[str]]:
    """Return `path -> further paths` for the tensors that have any."""
    return {path: list(others) for path, others in table.aliases.items() if others}


def unwatched(table: TensorTable) -> list[str]:
    """Return the paths of floating tensors that may be NaN or infinite without anything being wrong."""
    trained, sound, exempt = table.trained_parts, table.sound, table.exempt
    return [
        path
        for path, source in table.sources.items()
        if source.dtype in FLOATING
        and (path in exempt or not (source.is_trained or part_of(path) in trained or path in sound))
    ]


def copy_into(
    image: memoryview,
    plan: ImagePlan,
    sources: Mapping[str, TensorSource],
    *,
    file: tuple[int, int] | None = None,
) -> None:
    """Fill `image` with the headers of `plan` and the bytes of `sources` as they are now.

    `file` is where the image lies, if it is memory that is a file: a descriptor and an offset. Small
    tensors then go there many at a time.
    """
    base = address_of(image) if plan.size_bytes else 0
    for shard in plan.shards:
        start = plan.starts[shard.file]
        image[start : start + len(shard.header)] = shard.header
    tensors = list(sources.values())
    addresses = [source.address for source in tensors]
    one_by_one = [plan.places, *(row for row in plan.rows if not _gathered(row, addresses, file))]
    large: list[tuple[int, int, int]] = []
    for place in chain.from_iterable(one_by_one):
        address, target, size = addresses[place.index], place.offset, place.size_bytes
        if address is None:
            tensors[place.index].copy_to(image[target : target + size])
        elif size <= _PIECE_BYTES:
            ctypes.memmove(base + target, address, size)
        else:
            large.append((base + target, address, size))
    pieces = [
        (target + start, source + start, min(_PIECE_BYTES, size - start))
        for target, source, size in large
        for start in range(0, size, _PIECE_BYTES)
    ]
    share(lambda piece: ctypes.memmove(*piece), pieces, threads=_THREADS)


def _gathered(row: Sequence[Place], addresses: Sequence[int | None], file: tuple[int, int] | None) -> bool:
    """Fill `row` by one call; False if that cannot be, and then nothing is in it for certain."""
    found = [address for place in row if (address := addresses[place.index]) is not None]
    if file is None or len(found) < len(row):
        return False
    descriptor, start = file
    return gather(descriptor, start + row[0].offset, found, [place.size_bytes for place in row])
