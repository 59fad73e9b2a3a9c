"""A digest of whatever a loader or an optimizer hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from unbroken.checkpoint.digest import ALGORITHM, hasher
from unbroken.errors import UnsupportedStateError
from unbroken.state.table import TensorTable
from unbroken.state.tensors import bytes_of
from unbroken.state.tree import Encoder
from unbroken.training import families

_DEEPEST = 20


def content_digest(value: object) -> bytes:
    """Return a digest of tensors, arrays and plain values, nested in containers and in objects.

    Of objects that cannot be looked into, only the class counts.
    """
    found = hasher(ALGORITHM)
    for piece in _pieces(value, 0):
        found.update(piece)
    return found.hexdigest().encode()


def _pieces(value: Any, depth: int) -> Iterator[bytes | memoryview]:
    table = TensorTable()
    try:
        encoded = Encoder(table, families.codecs()).encode(value, "value")
    except UnsupportedStateError:
        yield from _pieces_inside(value, depth)
        return
    yield msgspec.json.encode(encoded)
    for source in table.sources.values():
        yield f"{source.dtype}{source.shape}".encode()
        yield bytes_of(source)


def _pieces_inside(value: Any, depth: int) -> Iterator[bytes | memoryview]:
    yield f"{type(value).__module__}.{type(value).__qualname__}".encode()
    if depth > _DEEPEST:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _pieces(key, depth + 1)
            yield from _pieces(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pieces(item, depth + 1)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield name.encode()
            yield from _pieces(item, depth + 1)
