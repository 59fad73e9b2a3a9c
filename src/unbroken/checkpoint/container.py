"""Shards: safetensors files laid out so that a host buffer is the file, byte for byte.

The header is padded with spaces, which the format allows, so that the tensors begin on a page
boundary; they are sorted by element size, so that each is aligned. See the safetensors format
description; docs/format.md says what we add.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.errors import DamagedError
from unbroken.state.tensors import ITEM_BYTES, TensorSource, size_bytes
from unbroken.storage.base import PAGE_BYTES

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
# The limit of the format's own reader: a longer header is an attack or damage.
_MAX_HEADER_BYTES = 100_000_000


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a tensor lies in a file: `offset` is from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The layout of a shard before any byte of its tensors is known."""

    file: str
    header: bytes
    placements: dict[str, Placement]
    size_bytes: int


def plan_shard(
    file: str, tensors: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None
) -> ShardPlan:
    """Return the layout of the shard `file` that holds `tensors`; `metadata` is told in its header."""
    order = sorted(tensors, key=lambda path: (-ITEM_BYTES[tensors[path].dtype], path))
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for path in order:
        tensor = tensors[path]
        begin, end = end, end + size_bytes(tensor.dtype, tensor.shape)
        entries[path] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    told = {_METADATA: dict(metadata)} if metadata else {}
    text = json.dumps(told | entries, separators=(",", ":")).encode()
    start = -(-(_LENGTH.size + len(text)) // PAGE_BYTES) * PAGE_BYTES
    header = _LENGTH.pack(start - _LENGTH.size) + text.ljust(start - _LENGTH.size)
    return ShardPlan(file=file, header=header, placements=_placements(entries, start), size_bytes=start + end)


def header_size(first_bytes: bytes | bytearray, file_bytes: int, where: str) -> int:
    """Return the size of the header, its length field included, from the first 8 bytes of a file."""
    if len(first_bytes) < _LENGTH.size:
        raise _damaged(where, f"at least {_LENGTH.size} bytes", f"{len(first_bytes)}")
    (length,) = _LENGTH.unpack_from(first_bytes)
    if length > min(_MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise _damaged(where, f"a header within {file_bytes} bytes", f"a header of {length} bytes")
    return int(length) + _LENGTH.size


def parse_header(header: bytes | bytearray, where: str) -> dict[str, Placement]:
    """Return the placements in `header`, which is whole and begins with its length field."""
    try:
        entries = msgspec.json.decode(header[_LENGTH.size :])
        entries.pop(_METADATA, None)
        placements = _placements(entries, len(header))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(where, "a safetensors header", f"{type(error).__name__}: {error}") from error
    for path, placed in placements.items():
        if placed.dtype not in ITEM_BYTES or placed.size_bytes != size_bytes(placed.dtype, placed.shape):
            raise _damaged(
                f"{where}: {path}", f"the bytes of {placed.dtype} {placed.shape}", f"{placed.size_bytes}"
            )
    return placements


def _placements(entries: Mapping[str, Any], start: int) -> dict[str, Placement]:
    placements = {}
    for path, entry in entries.items():
        begin, end = entry["data_offsets"]
        placements[path] = Placement(
            dtype=str(entry["dtype"]),
            shape=tuple(int(length) for length in entry["shape"]),
            offset=start + int(begin),
            size_bytes=int(end) - int(begin),
        )
    return placements


def _damaged(where: str, expected: str, found: str) -> DamagedError:
    return DamagedError(f"{where}: expected {expected}, found {found}", hint="use another checkpoint")
