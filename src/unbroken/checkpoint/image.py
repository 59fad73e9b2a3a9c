"""Where everything of a snapshot lies in memory: one piece, in which each shard is already its file."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from unbroken.checkpoint.container import ShardPlan, plan_shard
from unbroken.errors import UnsupportedStateError
from unbroken.rundir import layout
from unbroken.state.tensors import ITEM_BYTES, TensorSource, size_bytes
from unbroken.storage.base import PAGE_BYTES
from unbroken.storage.bulk import MOST_GATHERED

# A part with less than this shares one file with the other small ones: each file costs an fsync.
_OWN_SHARD_BYTES = 1 << 20
_SMALL_PARTS = "state"
_FROZEN = "-frozen"

# Neighbours of no more than this are copied together: for larger ones one call each is no cost.
_SMALL_BYTES = 64 << 10

_Signature = tuple[list[str], list[tuple[str, tuple[int, ...], bool]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tensors that follow each other in the image from `offset` on: small neighbours, or a larger one alone.

    `places` says which of all tensors they are, in the order of the table; `sizes` is in bytes.
    """

    offset: int
    places: list[int]
    sizes: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The layout for tensors of one `signature`: the shard `file` begins at `starts[file]`, on a page."""

    signature: _Signature
    shards: list[ShardPlan]
    starts: dict[str, int]
    size_bytes: int
    stretches: list[Stretch]


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
    stretches = _stretches(shards, starts, signature[0])
    return ImagePlan(signature=signature, shards=shards, starts=starts, size_bytes=end, stretches=stretches)


def _stretches(shards: Sequence[ShardPlan], starts: Mapping[str, int], paths: Sequence[str]) -> list[Stretch]:
    place_of = {path: place for place, path in enumerate(paths)}
    found: list[Stretch] = []
    for shard in shards:
        is_open = False
        for path, placed in shard.placements.items():
            size = placed.size_bytes
            if not size:
                continue
            is_small = size <= _SMALL_BYTES
            if not (is_open and is_small and len(found[-1].places) < MOST_GATHERED):
                offset = starts[shard.file] + placed.offset
                found.append(Stretch(offset=offset, places=[], sizes=array("Q")))
            found[-1].places.append(place_of[path])
            found[-1].sizes.append(size)
            is_open = is_small
    return found


def _plan_shards(tensors: Mapping[str, TensorSource]) -> list[ShardPlan]:
    """One shard for each large part, what is frozen in it apart; one for all the small ones."""
    by_part: dict[str, dict[str, TensorSource]] = {}
    for path, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise UnsupportedStateError(
                f"{path}: dtype {tensor.dtype} has no place in the safetensors format",
                hint="convert the tensor to a dtype that has, or keep it out of the state",
            )
        part = path.partition("/")[0] + (_FROZEN if tensor.is_frozen else "")
        by_part.setdefault(part, {})[path] = tensor
    groups: dict[str, dict[str, TensorSource]] = {}
    for part, members in by_part.items():
        total = sum(size_bytes(tensor.dtype, tensor.shape) for tensor in members.values())
        groups.setdefault(part if total >= _OWN_SHARD_BYTES else _SMALL_PARTS, {}).update(members)
    return [plan_shard(layout.shard_name(group), members) for group, members in sorted(groups.items())]


_KIND = attrgetter("dtype", "shape", "is_frozen")
