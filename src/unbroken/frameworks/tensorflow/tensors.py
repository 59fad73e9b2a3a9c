"""TensorFlow's variables, eager tensors, dtypes and shapes as leaves of a state."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.dtypes import NAMES, numpy_dtype
from unbroken.frameworks.tensorflow.distributed import (
    assign_value,
    copies_of,
    is_of_workers,
    is_one_value,
    is_variable,
    shards_of,
)
from unbroken.state.handlers import Difference
from unbroken.state.tensors import AwaitedTensor, LoadedTensor, TensorSource
from unbroken.state.tree import Json

_INSTEAD = {
    "complex128": "keep tf.math.real() and tf.math.imag() of it, which are of float64",
    "string": "keep a Python string, or a list of them",
    "variant": "keep the tensors that it is made of",
    "resource": "keep the variable or table that it is a handle of",
}


def dtype_name(dtype: object) -> str:
    """Return the name that the safetensors format has for a dtype of TensorFlow or NumPy.

    Raises UnsupportedStateError for one that it lacks.
    """
    known = str(getattr(dtype, "name", dtype)).removesuffix("_ref")
    name = NAMES.get(known)
    if name is None:
        raise UnsupportedStateError(
            f"cannot keep a tensor of dtype {known}, for which the safetensors format has no name",
            hint=_INSTEAD.get(known, "keep a tf.cast() or tf.bitcast() of it to another dtype"),
        )
    return name


class TfTensor(TensorSource):
    """A live variable or eager tensor as a source of bytes.

    The value is read when its bytes are asked for, and stays as it was then: a variable that is assigned
    to, or updated by a step, leaves a value that somebody holds alone. One that is distributed over copies
    is the one value that it has for those outside of them.
    """

    __slots__ = ("_array", "_tensor", "_value", "dtype", "is_frozen", "is_trained", "shape")

    def __init__(self, tensor: Any, *, is_frozen: bool = False, is_trained: bool | None = None) -> None:
        shards = shards_of(tensor)
        self.dtype = dtype_name(tensor.dtype)
        self._tensor = tensor
        self._value: Any = None
        self._array: np.ndarray[Any, Any] | None = None
        if isinstance(tensor, tf.Variable):
            refuse_without_value(tensor)
        shape = tensor.shape
        # One whose shape may change has that of its value.
        known = shape if shape.is_fully_defined() else self._read().shape
        self.shape = tuple(known.as_list())
        self.is_frozen = is_frozen  # type: ignore[misc]
        if is_trained is None:
            is_trained = is_variable(tensor) and (shards[0] if shards else tensor).trainable
        self.is_trained = bool(is_trained) and not is_frozen  # type: ignore[misc]

    @property
    def live(self) -> Any:
        """The variable or tensor itself."""
        return self._tensor

    @property
    def library(self) -> str | None:
        # A variable is filled; a tensor cannot be, and is made anew.
        return None if is_variable(self._tensor) else EagerTensorCodec.root

    @property
    def identity(self) -> Hashable | None:
        # Two variables may share memory for as long as neither is changed, and are two nevertheless.
        return ("tensorflow", id(self._tensor))

    @property
    def address(self) -> int | None:
        if 0 in self.shape or "CPU" not in self._read().device:
            return None
        return self._elements().ctypes.data

    def copy_to(self, target: memoryview) -> None:
        elements = self._elements()
        np.copyto(np.frombuffer(target, dtype=elements.dtype).reshape(self.shape), elements)

    def _read(self) -> Any:
        if self._value is None:
            self._value = read_value(self._tensor)
        return self._value

    def _elements(self) -> np.ndarray[Any, Any]:
        """Return the value as an array over its own memory, or over a copy of what lies on a device."""
        if self._array is None:
            self._array = _view(self._read(), self.dtype)
        return self._array


class _BesideItsCopies(TfTensor):
    """A distributed variable of which whoever keeps it keeps the unlike copies, too."""

    __slots__ = ()

    @property
    def library(self) -> str:
        return TensorFlowCodec.root


def beside_its_copies(variable: Any) -> Any:
    """Return what stands for `variable` in a state that has its unlike copies beside it: see Replicas."""
    has_copies = len(copies_of(variable)) > 1 or is_of_workers(variable)
    return _BesideItsCopies(variable) if has_copies else variable


class ArrayTensor(TensorSource):
    """An array of host memory that nobody changes, such as the value of a variable in a session."""

    __slots__ = ("_array", "dtype", "is_trained", "shape")

    def __init__(self, array: np.ndarray[Any, Any], *, is_trained: bool = False) -> None:
        self.dtype = dtype_name(array.dtype)
        self.shape = tuple(array.shape)
        self.is_trained = is_trained  # type: ignore[misc]
        self._array = np.asarray(array, order="C")

    @property
    def identity(self) -> Hashable | None:
        return None

    @property
    def address(self) -> int | None:
        return self._array.ctypes.data if self._array.size else None

    def copy_to(self, target: memoryview) -> None:
        np.copyto(np.frombuffer(target, dtype=self._array.dtype).reshape(self.shape), self._array)


class LoadedCopy(ArrayTensor):
    """A copy of a distributed variable as it was loaded, to be kept again before there is the variable."""

    __slots__ = ()

    @property
    def library(self) -> str:
        return TensorFlowCodec.root


def _view(value: Any, dtype: str) -> np.ndarray[Any, Any]:
    # Buffers of Python know no elements of eight bits with a point, nor of the sixteen bits of bfloat16.
    if dtype.startswith("F8_"):
        return np.asarray(value.numpy())
    return np.asarray(memoryview(tf.bitcast(value, tf.uint16) if dtype == "BF16" else value))


def read_value(tensor: Any) -> Any:
    """Return the value of a variable, or the tensor itself, as an eager tensor."""
    if not is_variable(tensor):
        return tensor
    if shards_of(tensor):
        return tf.convert_to_tensor(tensor)
    copies = copies_of(tensor)
    if not copies:
        return _read(tensor)
    if is_of_workers(tensor) or tensor.synchronization is not tf.VariableSynchronization.ON_READ:
        return _read(copies[0])
    if tensor.aggregation is tf.VariableAggregation.NONE:
        raise UnsupportedStateError(
            f"cannot keep the variable {tensor.name}, whose copies are not put together when it is read",
            hint="create it with aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA",
        )
    return tf.convert_to_tensor(tensor.read_value())


def refuse_without_value(variable: Any) -> None:
    """Raise UnsupportedStateError for a variable that only a session can read."""
    if copies_of(variable) or shards_of(variable) or hasattr(getattr(variable, "handle", None), "numpy"):
        return
    raise UnsupportedStateError(
        f"cannot keep the variable {variable.name}, whose value is in a session",
        hint="pass the tf.compat.v1.Session itself, as session=..., and all its variables are kept",
    )


def _refuse_unlike_copies(variable: Any) -> None:
    # Beside values of Python there is place for one value only; those who keep each copy do not ask for this.
    if not is_one_value(variable):
        raise UnsupportedStateError(
            f"cannot keep the variable {variable.name} in here, whose copies are not one value",
            hint="pass it as a part of its own, by a keyword of Run, or as an attribute of a tf.Module",
        )


def _read(variable: Any) -> Any:
    try:
        # Half the time of read_value(), which looks for a tape and puts the result under a name.
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    except tf.errors.FailedPreconditionError as error:
        raise UnsupportedStateError(
            f"cannot keep the variable {variable.name}, which has no value yet",
            hint="give it its first value before the run starts",
        ) from error


def is_eager(value: object) -> bool:
    """Tell whether `value` is a tensor that has a value of its own."""
    return isinstance(value, tf.Tensor) and hasattr(value, "numpy")


def variable_differences(name: str, live: Any, loaded: object) -> list[Difference]:
    """Return how a loaded array differs in shape and dtype from the live variable of that name."""
    if not isinstance(loaded, np.ndarray):
        text = f"expected a variable, the checkpoint holds a {type(loaded).__name__}"
        return [Difference("other", name, text)]
    found = []
    if not live.shape.is_compatible_with(loaded.shape):
        text = f"shape {tuple(live.shape)}, the checkpoint has shape {loaded.shape}"
        found.append(Difference("shape", name, text))
    if live.dtype.name.removesuffix("_ref") != loaded.dtype.name:
        text = f"dtype {live.dtype.name}, the checkpoint has dtype {loaded.dtype.name}"
        found.append(Difference("dtype", name, text))
    return found


class VariableValue(np.ndarray[Any, Any]):
    """An array that was loaded for a variable, told from one that was an array when it was kept."""


class TensorFlowCodec:
    """Variables and tensors become tensors; dtypes and shapes become their names.

    What was a variable is loaded as a NumPy array, to fill one with.
    """

    root = "tensorflow"

    def __init__(self, *, describes: bool = False) -> None:
        # For comparing what is loaded with what is there: dtype and shape, and no memory at all.
        self._describes = describes

    def encode(self, value: object) -> TfTensor | Json:
        if is_variable(value):
            _refuse_unlike_copies(value)
            return TfTensor(value)
        if is_eager(value):
            return TfTensor(value)
        if isinstance(value, tf.DType):
            return {"dtype": value.name}
        if isinstance(value, tf.TensorShape):
            return {"shape": None if value.rank is None else value.as_list()}
        raise UnsupportedStateError(
            f"cannot keep a value of type {type(value).__module__}.{type(value).__qualname__}",
            hint=_hint(value),
        )

    def decode_tensor(self, tensor: LoadedTensor) -> object:
        dtype = numpy_dtype(tensor.dtype)
        if self._describes:
            return np.broadcast_to(np.zeros((), dtype), tensor.shape).view(VariableValue)
        if isinstance(tensor, AwaitedTensor):
            if tensor.made is None:
                tensor.made = _await(tensor, dtype)
            return tensor.made
        return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape).copy().view(VariableValue)

    def decode_value(self, value: Json) -> object:
        assert isinstance(value, dict)
        if "dtype" in value:
            return tf.as_dtype(str(value["dtype"]))
        return tf.TensorShape(value["shape"])

    def assign(self, live: object, loaded: object) -> bool:
        fits = (
            is_variable(live)
            and isinstance(loaded, np.ndarray)
            and live.dtype.as_numpy_dtype == loaded.dtype
            and live.shape.is_compatible_with(loaded.shape)
        )
        if fits:
            assign_value(live, loaded)
        return fits

    def fills(self, live: object) -> bool:
        return is_variable(live)

    def misfit(self, live: object, loaded: object) -> str | None:
        if is_variable(live):
            if loaded is None:
                return "the checkpoint lacks it"
            found = variable_differences("", live, loaded)
            return "; ".join(item.text for item in found) or None
        if not isinstance(loaded, VariableValue):
            return None
        return f"expected the variable that the checkpoint holds, found a {type(live).__name__}"


class EagerTensorCodec:
    """Tensors that are no variables: they cannot be filled, so that equal ones take their place."""

    # No module is called so: they are encoded with all that is TensorFlow's, and loaded by this.
    root = "tensorflow.tensor"

    def __init__(self, *, describes: bool = False) -> None:
        self._arrays = TensorFlowCodec(describes=describes)
        self._describes = describes

    def encode(self, value: object) -> TfTensor | Json:
        return self._arrays.encode(value)

    def decode_tensor(self, tensor: LoadedTensor) -> object:
        if self._describes:
            return self._arrays.decode_tensor(tensor)
        return tf.constant(np.frombuffer(tensor.data, dtype=numpy_dtype(tensor.dtype)).reshape(tensor.shape))

    def decode_value(self, value: Json) -> object:
        return self._arrays.decode_value(value)

    def assign(self, live: object, loaded: object) -> bool:
        return False


def _await(awaited: AwaitedTensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a new array, whose memory will receive the bytes.

    Not the memory of the variable: as long as nobody has changed it, constants may have the same.
    """
    array = np.empty(awaited.shape, dtype)
    if array.size:
        awaited.memory = array.reshape(-1).view(np.uint8).data
    return array.view(VariableValue)


def _hint(value: object) -> str:
    if isinstance(value, tf.RaggedTensor):
        return "keep its flat_values and nested_row_splits"
    if isinstance(value, tf.SparseTensor):
        return "keep its indices, values and dense_shape"
    if tf.is_tensor(value):
        return "a tensor of a graph has no value of its own: keep what the function returns"
    return "make it a part of its own, by a keyword of Run, or keep the variables that it is made of"
