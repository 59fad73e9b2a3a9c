"""Where everything of a snapshot lies in memory: one piece, in which each shard is already its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from unbroken.checkpoint.container import ShardPlan, plan_shard
from unbroken.errors import UnsupportedStateError
from unbroken.rundir import layout
from unbroken.state.paths import part_of
from unbroken.state.tensors import ITEM_BYTES, TensorSource, size_bytes
from unbroken.storage.base import PAGE_BYTES
from unbroken.storage.bulk import MOST_GATHERED

# A part with less than this shares one file with the other small ones: each file costs an fsync.
_OWN_SHARD_BYTES = 1 << 20
_SMALL_PARTS = "state"
_FROZEN = "-frozen"

# Up to here the call that copies a tensor costs more than the copy: then one call for many of them.
_SMALL_BYTES = 4 << 10
_FEWEST_GATHERED = 4

_Signature = tuple[list[str], list[tuple[str, tuple[int, ...], bool]]]


class Place(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a tensor lies in the image; `index` is its number among all tensors, in their order."""

    index: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The layout for tensors of one `signature`: the shard `file` begins at `starts[file]`, on a page.

    Every tensor that is not empty is in `places`, or in one of `rows`: small ones, no gap between them.
    """

    signature: _Signature
    shards: list[ShardPlan]
    starts: dict[str, int]
    size_bytes: int
    places: list[Place]
    rows: list[list[Place]]


def plan_image(tensors: Mapping[str, TensorSource], known: ImagePlan | None = None) -> ImagePlan:
    """Return the layout for `tensors`; it is `known`, if that was made for tensors like these.

    Raises UnsupportedStateError for a dtype that has no place in a file.
    """
    signature = list(tensors), list(map(_KIND, tensors.values()))
    if known is not None and known.signature == signature:
        return known
    shards = _plan_shards(tensors)
    starts, end = {}, 0
    for shard in shards:
        starts[shard.file] = end
        end += -(-shard.size_bytes // PAGE_BYTES) * PAGE_BYTES
    places, rows = _rows(_places(shards, starts, signature[0]))
    return ImagePlan(
        signature=signature, shards=shards, starts=starts, size_bytes=end, places=places, rows=rows
    )


def _places(shards: Sequence[ShardPlan], starts: Mapping[str, int], paths: Sequence[str]) -> list[Place]:
    index_of = {path: index for index, path in enumerate(paths)}
    return [
        Place(index=index_of[path], offset=starts[shard.file] + placed.offset, size_bytes=placed.size_bytes)
        for shard in shards
        for path, placed in shard.placements.items()
        if placed.size_bytes
    ]


def _rows(places: Sequence[Place]) -> tuple[list[Place], list[list[Place]]]:
    """Return the places to be filled one by one, and rows of those that can be filled together."""
    rows: list[list[Place]] = []
    end = -1
    for place in places:
        is_small = place.size_bytes <= _SMALL_BYTES
        if not is_small or place.offset != end or len(rows[-1]) == MOST_GATHERED:
            rows.append([])
        rows[-1].append(place)
        end = place.offset + place.size_bytes if is_small else -1
    long = [row for row in rows if len(row) >= _FEWEST_GATHERED]
    return [place for row in rows if len(row) < _FEWEST_GATHERED for place in row], long


def _plan_shards(tensors: Mapping[str, TensorSource]) -> list[ShardPlan]:
    """One shard for each large part, what is frozen in it apart; one for all the small ones."""
    by_part: dict[str, dict[str, TensorSource]] = {}
    for path, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise UnsupportedStateError(
                f"{path}: dtype {tensor.dtype} has no place in the safetensors format",
                hint="convert the tensor to a dtype that has, or keep it out of the state",
            )
        part = part_of(path) + (_FROZEN if tensor.is_frozen else "")
        by_part.setdefault(part, {})[path] = tensor
    groups: dict[str, dict[str, TensorSource]] = {}
    for part, members in by_part.items():
        total = sum(size_bytes(tensor.dtype, tensor.shape) for tensor in members.values())
        groups.setdefault(part if total >= _OWN_SHARD_BYTES else _SMALL_PARTS, {}).update(members)
    return [plan_shard(layout.shard_name(group), members) for group, members in sorted(groups.items())]


_KIND = attrgetter("dtype", "shape", "is_frozen")
