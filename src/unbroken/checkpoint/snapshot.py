"""A state in host memory: captured in one pass, then free of the live objects."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unbroken.checkpoint.container import ShardPlan, plan_shard
from unbroken.checkpoint.manifest import PartEntry, Position
from unbroken.errors import UnsupportedStateError
from unbroken.rundir import layout
from unbroken.state.tensors import ITEM_BYTES, TensorSource, size_bytes
from unbroken.state.tree import TensorTable

# A part with less than this shares one file with the other small ones: each file costs an fsync.
_OWN_SHARD_BYTES = 1 << 20
_SMALL_PARTS = "state"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A captured state. `images` holds, for each shard, the file's bytes as they will be written."""

    description: Description
    plans: list[ShardPlan]
    images: dict[str, memoryview]
    aliases: dict[str, list[str]]


class HostBuffers:
    """Memory for one snapshot at a time, kept from save to save.

    Fresh pages cost ten times the copy into them, so the buffers are reused; a snapshot is
    therefore valid only until the next capture.
    """

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def get(self, name: str, size: int) -> memoryview:
        """Return `size` bytes of writable, page-aligned memory for the shard `name`."""
        found = self._maps.get(name)
        if found is None or len(found) < size:
            found = mmap.mmap(-1, max(size, 1))
            # Huge pages make the first copy five times as fast; a kernel without them refuses.
            with suppress(OSError, AttributeError):
                found.madvise(mmap.MADV_HUGEPAGE)
            self._maps[name] = found
        return memoryview(found)[:size]


def capture(description: Description, table: TensorTable, buffers: HostBuffers) -> Snapshot:
    """Copy every tensor of `table` into `buffers`; this copy is all that training waits for."""
    plans = plan_shards(table.sources)
    images = {}
    for plan in plans:
        image = buffers.get(plan.file, plan.size_bytes)
        image[: len(plan.header)] = plan.header
        for path, placed in plan.placements.items():
            if placed.size_bytes:
                table.sources[path].copy_to(image[placed.offset : placed.offset + placed.size_bytes])
        images[plan.file] = image
    aliases = {path: list(others) for path, others in table.aliases.items()}
    return Snapshot(description=description, plans=plans, images=images, aliases=aliases)


def plan_shards(tensors: Mapping[str, TensorSource]) -> list[ShardPlan]:
    """Return the shards for `tensors`: one for each large part, one for all the small ones."""
    by_part: dict[str, dict[str, TensorSource]] = {}
    for path, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise UnsupportedStateError(
                f"{path}: dtype {tensor.dtype} has no place in the safetensors format",
                hint="convert the tensor to a dtype that has, or keep it out of the state",
            )
        by_part.setdefault(path.partition("/")[0], {})[path] = tensor
    groups: dict[str, dict[str, TensorSource]] = {}
    for part, members in by_part.items():
        total = sum(size_bytes(tensor.dtype, tensor.shape) for tensor in members.values())
        groups.setdefault(part if total >= _OWN_SHARD_BYTES else _SMALL_PARTS, {}).update(members)
    return [plan_shard(layout.shard_name(group), members) for group, members in sorted(groups.items())]
