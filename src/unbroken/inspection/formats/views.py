"""Tensors in a file as views of rows of elements, and how torch and NumPy name what is in them."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from unbroken.inspection.formats.base import DTYPE_BITS, encodable, tensor_bytes
from unbroken.inspection.formats.opcodes import Global, Object

_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "QInt8Storage": "QI8",
    "QUInt8Storage": "QU8",
    "QInt32Storage": "QI32",
    "UntypedStorage": "U8",
}
TORCH_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
NUMPY_DTYPES = {
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "i1": "I8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "u1": "U8",
    "u2": "U16",
    "u4": "U32",
    "u8": "U64",
    "b1": "BOOL",
    "c8": "C64",
    "c16": "C128",
}

_SEQUENCES, _KEYS = (tuple, list), (str, int)
_CODES = {
    "BOOL": "?",
    "I8": "b",
    "U8": "B",
    "I16": "h",
    "U16": "H",
    "I32": "i",
    "U32": "I",
    "I64": "q",
    "U64": "Q",
    "F16": "e",
    "F32": "f",
    "F64": "d",
}


# Named tuples: there is one of each for every tensor, and frozen dataclasses take three times as long.
class Storage(NamedTuple):
    """Elements in a row: the bytes of entry `key` outside the pickle, or `data` inside it."""

    key: str
    dtype: str
    data: memoryview | None = None


class View(NamedTuple):
    """A tensor: the elements of `storage` that it shows. Offset and strides count elements.

    `big_endian` is None where the file says it for all of them.
    """

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    size_bytes: int
    big_endian: bool | None = None

    @property
    def identity(self) -> object:
        """Equal for two views of the same elements: tied weights."""
        place = self.storage.key if self.storage.data is None else id(self.storage.data)
        return (place, self.dtype, self.shape, self.offset, self.strides)


def make_view(
    storage: Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    *,
    dtype: str | None = None,
    big_endian: bool | None = None,
) -> View | None:
    """Return the view that these describe, or None if no tensor is like that."""
    shape, strides = integers(shape), integers(strides)
    dtype = dtype or storage.dtype
    if shape is None or strides is None or len(strides) != len(shape) or type(offset) is not int:
        return None
    size = tensor_bytes(dtype, shape)
    if size is None or offset < 0:
        return None
    return View(
        storage=storage,
        dtype=dtype,
        shape=shape,
        offset=offset,
        strides=strides,
        size_bytes=size,
        big_endian=big_endian,
    )


def torch_storage(identity: Any) -> Storage | None:
    """Return the storage that torch names by a persistent identity, None if it is of another form.

    Whether it means a range of that storage only is told by `is_part_of_storage`.
    """
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        return None
    kind, key = identity[1], identity[2]
    if not isinstance(kind, Global) or not isinstance(key, _KEYS):
        return None
    dtype = _STORAGES.get(kind.name)
    return Storage(key=encodable(str(key)), dtype=dtype) if dtype else None


def is_part_of_storage(identity: Any) -> bool:
    """Tell whether a persistent identity means a range of a storage, as very old files of torch have it."""
    return isinstance(identity, tuple) and len(identity) > 5 and identity[5] is not None


def storage_in_words(identity: Any) -> str:
    """Return why a storage is none of those that are read."""
    kind = identity[1] if isinstance(identity, tuple) and len(identity) > 2 else None
    if is_part_of_storage(identity):
        return "it lies in a part of a storage"
    return f"storage {encodable(kind.name)}" if isinstance(kind, Global) else "a storage of another form"


def integers(values: Any) -> tuple[int, ...] | None:
    """Return a tuple of whole numbers that are not negative, None for anything else."""
    if isinstance(values, Object) and values.kind == "torch.Size" and values.arguments:
        values = values.arguments[0]
    if not isinstance(values, _SEQUENCES) or len(values) > 64:
        return None
    for value in values:
        if type(value) is not int or value < 0:
            return None
    return tuple(values)


def numpy_dtype(node: Any) -> tuple[str, bool] | None:
    """Return the dtype that a pickled `numpy.dtype` means and whether it is big-endian, None if unknown."""
    if not isinstance(node, Object) or not node.arguments or not isinstance(node.arguments[0], str):
        return None
    text = node.arguments[0]
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "<"
    dtype = NUMPY_DTYPES.get(text.lstrip("<>|="))
    return None if dtype is None else (dtype, (text[:1] if text[:1] in "<>" else order) == ">")


def scalar(data: bytes, dtype: str, is_big_endian: bool) -> Any:
    """Return the number that these bytes are, or what Python prints of them."""
    code = _CODES.get(dtype)
    if code is None or len(data) * 8 != DTYPE_BITS[dtype]:
        return repr(data)
    return struct.unpack((">" if is_big_endian else "<") + code, data)[0]
