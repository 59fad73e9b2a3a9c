"""What the header of an array in HDF5 says of its shape, the kind of its numbers and where they lie. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_MOST_DIMENSIONS = 32
_LARGEST_LENGTH = 1 << 50
_UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF
# The classes of data types.
_INTEGER, _FLOAT, _STRING, _OPAQUE, _COMPOUND, _ENUMERATION, _VARIABLE = 0, 1, 3, 5, 6, 8, 9
_WORDS = {2: "times", 3: "text", 4: "bits", 6: "records", 7: "references", 9: "text or lists", 10: "arrays"}
# By the bits of the whole, of the exponent and of the mantissa.
_FLOATS = {
    (16, 5, 10): "F16",
    (16, 8, 7): "BF16",
    (32, 8, 23): "F32",
    (64, 11, 52): "F64",
    (8, 5, 2): "F8_E5M2",
}
_BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What numbers are: the name of safetensors, None for what is no number, with `words` for it."""

    dtype: str | None
    item_bytes: int
    is_big_endian: bool = False
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where numbers lie: at `address`, None if nowhere yet, or in the header itself as `data`."""

    form: Literal["compact", "contiguous", "chunked", "virtual"]
    address: int | None = None
    data: bytes | None = None


def shape_of(body: bytes) -> tuple[int, ...] | None:
    """Return the shape that a dataspace means, None for one without any. Raises ValueError, struct.error."""
    version, rank = body[0], body[1]
    if version == 2 and body[3] == 2:
        return None
    if version not in (1, 2) or rank > _MOST_DIMENSIONS:
        raise ValueError(f"a shape of version {version} with {rank} dimensions")
    shape = struct.unpack_from(f"<{rank}Q", body, 8 if version == 1 else 4)
    if any(length > _LARGEST_LENGTH for length in shape):
        raise ValueError(f"a shape of {max(shape)} elements")
    return shape


def kind_of(body: bytes, attributes: Mapping[str, Any]) -> Kind:
    """Return what a data type means; the attributes say what HDF5 has no name for."""
    group, order = body[0] & 0x0F, bool(body[1] & 1)
    (size,) = struct.unpack_from("<I", body, 4)
    dtype: str | None = None
    if group == _INTEGER:
        dtype = _integer(body, size)
    elif group == _FLOAT:
        bits, exponent, mantissa = struct.unpack_from("<H", body, 10)[0], body[13], body[15]
        dtype = _FLOATS.get((bits, exponent, mantissa)) if bits == size * 8 else None
    elif group == _ENUMERATION and size == 1 and b"FALSE\0" in body and b"TRUE\0" in body:
        dtype = "BOOL"
    elif group == _COMPOUND and size in (8, 16) and _is_complex(body):
        dtype = "C64" if size == 8 else "C128"
        order = _is_big_endian_inside(body)
    elif group == _OPAQUE and size == 2 and attributes.get("dtype") == _BFLOAT16:
        dtype, order = "BF16", False
    words = _WORDS.get(group, "numbers of another kind")
    return Kind(dtype=dtype, item_bytes=size, is_big_endian=order and dtype is not None, words=words)


def layout_of(body: bytes) -> Layout:
    """Return where the numbers of an array lie. Raises ValueError, struct.error."""
    version = body[0]
    if version in (1, 2):
        form, start = body[2], 8
        return _contiguous(body, start) if form == 1 else Layout(form="chunked")
    if version not in (3, 4, 5):
        raise ValueError(f"a layout of version {version}")
    if body[1] == 0:
        (size,) = struct.unpack_from("<H", body, 2)
        return Layout(form="compact", data=body[4 : 4 + size])
    if body[1] == 1:
        return _contiguous(body, 2)
    if body[1] in (2, 3):
        return Layout(form="chunked" if body[1] == 2 else "virtual")
    raise ValueError(f"a layout of class {body[1]}")


def _contiguous(body: bytes, start: int) -> Layout:
    (address,) = struct.unpack_from("<Q", body, start)
    return Layout(form="contiguous", address=None if address == _UNDEFINED else address)


def _integer(body: bytes, size: int) -> str | None:
    offset, bits = struct.unpack_from("<HH", body, 8)
    if offset or bits != size * 8 or size not in (1, 2, 4, 8):
        return None
    return f"{'I' if body[1] & 8 else 'U'}{bits}"


def _is_complex(body: bytes) -> bool:
    """Tell whether a record is of two numbers that are called r and i, as NumPy's complex ones are kept."""
    return struct.unpack_from("<H", body, 1)[0] == 2 and body[8:10] == b"r\0" and b"i\0" in body


def _is_big_endian_inside(body: bytes) -> bool:
    # A float type begins with its class and version, then its byte order; the first one is that of r.
    place = next((at for at in range(10, len(body) - 4) if body[at] in (0x11, 0x31)), None)
    return place is not None and bool(body[place + 1] & 1)
