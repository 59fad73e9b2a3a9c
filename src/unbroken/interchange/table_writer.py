"""Sorted tables as `table.py` reads them: writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unbroken.interchange.crc32c import crc32c, masked
from unbroken.interchange.marks import TABLE_MAGIC
from unbroken.interchange.protobuf import encoded_varint
from unbroken.interchange.table import encoded_handles

# As many keys apart are those that are written in full.
_RESTART_EVERY = 16
_BLOCK_BYTES = 1 << 18
_PLAIN = b"\0"


def encoded_table(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yield the bytes of a table piece by piece; keys have to come in their order, each once."""
    handles, written = [], 0
    for block, last in _blocks(entries):
        handles.append((last, _handle(written, block)))
        yield (piece := _closed(block))
        written += len(piece)
    meta = _block([], _RESTART_EVERY)
    yield _closed(meta)
    index, start = _block(handles, 1), written + len(_closed(meta))
    yield _closed(index)
    yield encoded_handles(written, len(meta), start, len(index)) + TABLE_MAGIC


def _blocks(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the blocks of a table, each with its last key."""
    waiting: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in entries:
        waiting.append((key, value))
        size += len(key) + len(value)
        if size >= _BLOCK_BYTES:
            yield _block(waiting, _RESTART_EVERY), key
            waiting, size = [], 0
    if waiting:
        yield _block(waiting, _RESTART_EVERY), waiting[-1][0]


def _block(entries: list[tuple[bytes, bytes]], restart_every: int) -> bytes:
    found = bytearray()
    restarts, last = [0], b""
    for count, (key, value) in enumerate(entries):
        is_restart = count % restart_every == 0
        if is_restart and count:
            restarts.append(len(found))
        shared = 0 if is_restart else _shared(last, key)
        lengths = (shared, len(key) - shared, len(value))
        found += b"".join(map(encoded_varint, lengths)) + key[shared:] + value
        last = key
    places = b"".join(place.to_bytes(4, "little") for place in (*restarts, len(restarts)))
    return bytes(found) + places


def _shared(first: bytes, second: bytes) -> int:
    """Return how many bytes two keys begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((count for count, (one, other) in pairs if one != other), min(len(first), len(second)))


def _closed(block: bytes) -> bytes:
    return block + _PLAIN + masked(crc32c(block + _PLAIN)).to_bytes(4, "little")


def _handle(start: int, block: bytes) -> bytes:
    return encoded_varint(start) + encoded_varint(len(block))
