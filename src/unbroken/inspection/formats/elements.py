"""The bytes of a view, row-major and little-endian, from the bytes of its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unbroken.inspection.formats.base import (
    DTYPE_BITS,
    StoredTensor,
    damaged,
    extent,
    gather,
    is_in_order,
    swapped,
)
from unbroken.inspection.formats.views import View


def stored(view: View, where: str, aliases: Iterable[str]) -> StoredTensor:
    """Return the entry of a listing for a view."""
    return StoredTensor(
        dtype=view.dtype, shape=view.shape, size_bytes=view.size_bytes, where=where, aliases=tuple(aliases)
    )


def needed_bytes(view: View) -> int:
    """Return how long the storage of a view must be at least."""
    count = extent(view.shape, view.strides)
    return (view.offset + count) * DTYPE_BITS[view.dtype] // 8 if count else 0


def read_view(
    view: View, read_range: Callable[[int, int], bytearray], is_big_endian: bool = False
) -> memoryview:
    """Return the elements of a view; `read_range` gives bytes of a storage that is not in the pickle.

    Raises DamagedError if the storage ends before the view does.
    """
    item = DTYPE_BITS[view.dtype] // 8
    start, size = view.offset * item, extent(view.shape, view.strides) * item
    if not size:
        return memoryview(bytearray())
    inline = view.storage.data
    if inline is None:
        data = read_range(start, size)
    elif start + size <= len(inline):
        data = bytearray(inline[start : start + size])
    else:
        raise damaged("an array in a pickle", f"{start + size} bytes", f"{len(inline)}")
    if is_big_endian if view.big_endian is None else view.big_endian:
        data = swapped(data, view.dtype)
    if is_in_order(view.shape, view.strides):
        return memoryview(data)
    return memoryview(gather(memoryview(data), item, view.shape, view.strides))
