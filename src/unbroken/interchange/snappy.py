"""Snappy, the compression of blocks in tables: reading only."""

from __future__ import annotations

from unbroken.interchange.files import damaged
from unbroken.interchange.protobuf import varint

# An element of three bytes copies at most 64.
_LARGEST_GROWTH = 22


def unpacked(data: memoryview, most_bytes: int, where: str) -> bytes:
    """Return the content of a packed block. Raises DamagedError if it is none, or over `most_bytes`."""
    size, position = varint(data, 0, where)
    if size > min(most_bytes, len(data) * _LARGEST_GROWTH):
        raise damaged(where, f"at most {most_bytes} bytes when unpacked", f"{size} from {len(data)}")
    found = bytearray()
    while position < len(data):
        offset, length, position = _element(data, position, where)
        if not offset:
            found += data[position : position + length]
            position += length
        else:
            _repeat(found, offset, length, where)
        if position > len(data) or len(found) > size:
            break
    if position != len(data) or len(found) != size:
        raise damaged(where, f"{size} bytes when unpacked", f"{len(found)}")
    return bytes(found)


def _element(data: memoryview, position: int, where: str) -> tuple[int, int, int]:
    """Return how far back a copy begins (0 for bytes that stand here), its length, and what follows."""
    tag = data[position]
    kind, rest = tag & 3, tag >> 2
    extra = (max(rest - 59, 0), 1, 2, 4)[kind]
    end = position + 1 + extra
    if end > len(data):
        raise damaged(where, "an element within its block", f"one cut short at byte {position}")
    value = int.from_bytes(data[position + 1 : end], "little")
    if kind == 0:
        return 0, (value if extra else rest) + 1, end
    offset = value | (rest >> 3) << 8 if kind == 1 else value
    if not offset:
        raise damaged(where, "a copy of what is before it", f"one of itself at byte {position}")
    return offset, (rest & 7) + 4 if kind == 1 else rest + 1, end


def _repeat(found: bytearray, offset: int, length: int, where: str) -> None:
    if offset > len(found):
        raise damaged(where, f"a copy from within {len(found)} bytes", f"one from {offset} back")
    start = len(found) - offset
    # A copy may reach into what it makes.
    piece = bytes(found[start : start + length])
    found += (piece * (length // len(piece) + 1))[:length]
