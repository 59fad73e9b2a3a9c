"""The types of TensorFlow by their numbers in files, and what each is called in safetensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """`name` is TensorFlow's; `dtype` that of safetensors, or of what is read as plain bytes or integers.

    `item_bytes` is None for what has no fixed size.
    """

    name: str
    dtype: str
    item_bytes: int | None

    @property
    def is_number(self) -> bool:
        return self.item_bytes is not None


_NUMBERS = {
    1: ("float32", "F32", 4),
    2: ("float64", "F64", 8),
    3: ("int32", "I32", 4),
    4: ("uint8", "U8", 1),
    5: ("int16", "I16", 2),
    6: ("int8", "I8", 1),
    8: ("complex64", "C64", 8),
    9: ("int64", "I64", 8),
    10: ("bool", "BOOL", 1),
    11: ("qint8", "QI8", 1),
    12: ("quint8", "QU8", 1),
    13: ("qint32", "QI32", 4),
    14: ("bfloat16", "BF16", 2),
    15: ("qint16", "I16", 2),
    16: ("quint16", "U16", 2),
    17: ("uint16", "U16", 2),
    18: ("complex128", "C128", 16),
    19: ("float16", "F16", 2),
    22: ("uint32", "U32", 4),
    23: ("uint64", "U64", 8),
    24: ("float8_e5m2", "F8_E5M2", 1),
    25: ("float8_e4m3fn", "F8_E4M3", 1),
    26: ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    27: ("float8_e4m3b11fnuz", "U8", 1),
    28: ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    # Each element of these has a byte of its own.
    29: ("int4", "I8", 1),
    30: ("uint4", "U8", 1),
    31: ("int2", "I8", 1),
    32: ("uint2", "U8", 1),
}
_OTHERS = {7: "string", 20: "resource", 21: "variant"}
# What is kept under the name of another type, which is not the one to write.
_STAND_INS = frozenset({15, 16, 27, 29, 30, 31, 32})
_SIGNED_BITS = {"int4": 4, "int2": 2}

_ELEMENTS = {
    number: ElementType(name=name, dtype=dtype, item_bytes=item_bytes)
    for number, (name, dtype, item_bytes) in _NUMBERS.items()
}
_STAND_IN_NAMES = frozenset(_NUMBERS[number][0] for number in _STAND_INS)
TF_NUMBERS = {dtype: number for number, (_, dtype, _) in _NUMBERS.items() if number not in _STAND_INS}


def element_type(number: int) -> ElementType:
    """Return the type of a number in a file; one that is not known here has no size."""
    known = _ELEMENTS.get(number)
    if known is not None:
        return known
    name = _OTHERS.get(number, f"type {number}")
    return ElementType(name=name, dtype=name, item_bytes=None)


def is_stand_in(kind: ElementType) -> bool:
    """Tell whether elements are read as integers because safetensors has no name for what they are."""
    return kind.is_number and kind.name in _STAND_IN_NAMES


def widened(data: bytearray, kind: ElementType) -> bytearray:
    """Return elements of a small integer type as whole bytes: in files, the sign stops at their own bits."""
    bits = _SIGNED_BITS.get(kind.name)
    return data if bits is None else data.translate(_sign_extended(bits))


def _sign_extended(bits: int) -> bytes:
    half, whole = 1 << bits - 1, 1 << bits
    return bytes((((value & whole - 1) ^ half) - half) & 0xFF for value in range(256))
