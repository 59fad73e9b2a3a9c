"""A pickle of named tensors as `torch.save` writes it, made of its opcodes: torch is not needed.

There is nothing in it but what `torch.load(weights_only=True)` allows. The opcodes are those of protocol 2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_BEGIN, _END = b"\x80\x02}(", b"u."
_MARK, _TUPLE, _CALL, _OUTSIDE, _FALSE, _NO_ITEMS = b"(", b"t", b"R", b"Q", b"\x89", b")"
_PUT, _GET = b"q", b"h"
# What storages of these dtypes are called; all others are storages of bytes.
_STORAGES = {
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "C128": "ComplexDoubleStorage",
}
_BYTES = {
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C32": "complex32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
TORCH_NAMES = frozenset({*_STORAGES, *_BYTES})


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """A tensor under `names`, of which all but the first are ties; its elements are storage `key`."""

    names: tuple[str, ...]
    key: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def pickled(tensors: Iterable[PickledTensor]) -> bytes:
    """Return the pickle of a dictionary of `tensors` by their names; each dtype is one of `TORCH_NAMES`."""
    words = _Words()
    items = (
        _text(name) + _tensor(words, tensor, strides)
        for tensor in tensors
        for strides in (_strides(tensor.shape),)
        for name in tensor.names
    )
    return b"".join((_BEGIN, *items, _END))


class _Words:
    """What each tensor has in common with others: written once, and then meant by a number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __call__(self, code: bytes) -> bytes:
        number = self._numbers.get(code)
        if number is not None:
            return _GET + bytes([number])
        number = self._numbers[code] = len(self._numbers)
        return code + _PUT + bytes([number])


def _tensor(words: _Words, tensor: PickledTensor, strides: tuple[int, ...]) -> bytes:
    """Return the call that makes a tensor: a view of all of its storage."""
    storage = _STORAGES.get(tensor.dtype)
    kind = _global("torch", storage) if storage else _global("torch.storage", "UntypedStorage")
    count = math.prod(tensor.shape) if storage else tensor.size_bytes
    identity = (
        *(_MARK, words(_text("storage")), words(kind), _text(tensor.key), words(_text("cpu"))),
        *(_number(count), _TUPLE, _OUTSIDE),
    )
    version = "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"
    hooks = words(_global("collections", "OrderedDict")) + _NO_ITEMS + _CALL
    dtype = b"" if storage else words(_global("torch", _BYTES[tensor.dtype]))
    return b"".join(
        (
            *(words(_global("torch._utils", version)), _MARK, *identity, _number(0)),
            *(_numbers(tensor.shape), _numbers(strides), _FALSE, hooks, dtype, _TUPLE, _CALL),
        )
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of torch for elements in order, in which no length counts as less than 1."""
    return tuple(math.prod(max(length, 1) for length in shape[at + 1 :]) for at in range(len(shape)))


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _numbers(numbers: tuple[int, ...]) -> bytes:
    return b"".join((_MARK, *map(_number, numbers), _TUPLE))


def _number(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes([number])
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    size = number.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + number.to_bytes(size, "little")
