"""NumPy arrays, scalars and dtypes as leaves of a state."""

from __future__ import annotations

import base64
from collections.abc import Hashable
from typing import Any

import numpy as np

from unbroken.errors import UnsupportedStateError
from unbroken.state.handlers import ORDER_VALUE, Difference
from unbroken.state.tensors import LoadedTensor, TensorSource
from unbroken.state.tree import Json

# What the safetensors format calls the dtypes of NumPy.
NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES = {name: np.dtype(numpy_name) for numpy_name, name in NAMES.items()}


class NumpyTensor(TensorSource):
    """A live array as a source of bytes."""

    __slots__ = ("_array", "dtype", "shape")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.name not in NAMES or not array.dtype.isnative:
            raise UnsupportedStateError(
                f"cannot keep an array of dtype {array.dtype}",
                hint="convert it to a numeric dtype in native byte order",
            )
        self._array = array
        self.dtype = NAMES[array.dtype.name]
        self.shape = tuple(array.shape)

    @property
    def identity(self) -> Hashable | None:
        array = self._array
        address = array.__array_interface__["data"][0]
        return ("numpy", address, self.shape, array.strides, self.dtype) if array.size else None

    @property
    def address(self) -> int | None:
        array = self._array
        return int(array.__array_interface__["data"][0]) if array.flags.c_contiguous else None

    def copy_to(self, target: memoryview) -> None:
        np.copyto(np.frombuffer(target, dtype=self._array.dtype).reshape(self.shape), self._array)


class NumpyCodec:
    """Arrays become tensors; scalars and dtypes keep their exact type."""

    root = "numpy"

    def encode(self, value: object) -> NumpyTensor | Json:
        if type(value) is np.ndarray:
            return NumpyTensor(value)
        if isinstance(value, np.dtype):
            return {"dtype": value.str}
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "V":
            return {"scalar": value.dtype.str, "bytes": base64.b64encode(value.tobytes()).decode()}
        raise UnsupportedStateError(
            f"cannot keep a value of type {type(value).__module__}.{type(value).__qualname__}",
            hint="keep plain arrays and scalars; a random generator is a part of its own",
        )

    def decode_tensor(self, tensor: LoadedTensor) -> object:
        return np.frombuffer(tensor.data, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape).copy()

    def decode_value(self, value: Json) -> object:
        assert isinstance(value, dict)
        if "dtype" in value:
            return np.dtype(str(value["dtype"]))
        data = base64.b64decode(str(value["bytes"]))
        return np.frombuffer(data, dtype=np.dtype(str(value["scalar"])))[0]

    def assign(self, live: object, loaded: object) -> bool:
        fits = (
            isinstance(live, np.ndarray)
            and isinstance(loaded, np.ndarray)
            and (live.shape, live.dtype) == (loaded.shape, loaded.dtype)
            and live.flags.writeable
        )
        if fits:
            np.copyto(live, loaded)  # type: ignore[arg-type]
        return fits


class ArrayHandler:
    """An array that is a part of its own, filled in place."""

    name = "numpy.array"
    order = ORDER_VALUE

    def accepts(self, value: object) -> bool:
        return isinstance(value, np.ndarray)

    def state(self, value: Any) -> object:
        return value

    def differences(self, value: Any, state: Any) -> list[Difference]:
        expected = (value.dtype.name, value.shape)
        found = (state.dtype.name, state.shape) if isinstance(state, np.ndarray) else (type(state).__name__,)
        if expected == found:
            return []
        return [Difference("other", "", f"expected {expected}, the checkpoint holds {found}")]

    def restore(self, value: Any, state: Any) -> None:
        # Another shape, where the user allows it, stays as it is.
        if value.shape == state.shape:
            np.copyto(value, state)
