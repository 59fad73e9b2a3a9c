"""Variables of Keras as sources of bytes, and filled from bytes, on whichever framework is below."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.dtypes import NAMES, known_name, numpy_dtype
from unbroken.state.handlers import Difference
from unbroken.state.tensors import HostTensor, LoadedTensor, TensorSource


def source_of(variable: keras.Variable, *, is_frozen: bool = False, is_trained: bool = False) -> TensorSource:
    """Return the live `variable` as a source of bytes."""
    refuse_without_value(variable)
    backend = keras.config.backend()
    if backend == "tensorflow":
        from unbroken.frameworks.tensorflow.tensors import TfTensor

        return TfTensor(raw(variable), is_frozen=is_frozen, is_trained=is_trained)
    if backend == "torch":
        from unbroken.frameworks.torch.tensors import TorchTensor

        source = TorchTensor(raw(variable))
        source.is_frozen, source.is_trained = is_frozen, is_trained  # type: ignore[misc]
        return source
    # An array of JAX is never changed in place: this is the value of now.
    array = np.ascontiguousarray(variable.numpy())
    name = NAMES.get(array.dtype.name)
    if name is None:
        raise UnsupportedStateError(
            f"cannot keep a variable of dtype {array.dtype}, for which the safetensors format has no name",
            hint="keep it as another dtype",
        )
    return HostTensor(name, tuple(variable.shape), _bytes_of(array))


def has_value(variable: keras.Variable) -> bool:
    """Tell whether Keras has made `variable`; inside a stateless scope it does so later."""
    return getattr(variable, "_value", variable) is not None


def refuse_without_value(variable: keras.Variable) -> None:
    """Raise UnsupportedStateError for a variable that Keras is still to make."""
    if not has_value(variable):
        raise UnsupportedStateError(
            f"cannot keep the variable {variable.path}, which has no value yet",
            hint="build the model outside of a stateless scope, before the run starts",
        )


def array_of(tensor: LoadedTensor) -> np.ndarray[Any, Any]:
    """Return the array with these bytes, of a dtype of ml_dtypes where NumPy has none."""
    dtype = numpy_dtype(tensor.dtype)
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))


def fill(variable: keras.Variable, tensor: LoadedTensor) -> None:
    """Give `variable` the value `tensor`, of the same shape, in the dtype that the variable has."""
    fill_with(variable, array_of(tensor))


def fill_with(variable: keras.Variable, array: np.ndarray[Any, Any]) -> None:
    """Give `variable` the value `array`, of the same shape, in the dtype that the variable has."""
    backend = keras.config.backend()
    if backend == "torch":
        import torch

        with torch.no_grad():
            # In place: what has been compiled, or holds the tensor, goes on with it.
            raw(variable).copy_(_torch_tensor(array))
    elif backend == "tensorflow":
        from unbroken.frameworks.tensorflow.distributed import assign_value

        # In the dtype of the variable before: TensorFlow takes no other.
        dtype = numpy_dtype(NAMES[variable.dtype])
        assign_value(raw(variable), array.astype(dtype, copy=False))
    else:
        variable.assign(array)


def outside_of_functions() -> AbstractContextManager[Any]:
    """Return a context in which values are set now, also while a tf.function is traced."""
    if keras.config.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    context: AbstractContextManager[Any] = tf.init_scope()
    return context


def builds_in_traces() -> bool:
    """Tell whether layers and metrics are built where variables have no values, ahead of training."""
    return bool(keras.config.backend() == "jax")


def put_values_back(model: Any) -> None:
    """Have the variables of a `model` that is in training hold their values, which fit keeps on JAX."""
    if keras.config.backend() == "jax":
        model.jax_state_sync()


def is_replicated() -> bool:
    """Tell whether this is done under a strategy of TensorFlow, once for each replica."""
    if keras.config.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.has_strategy())


def _torch_tensor(array: np.ndarray[Any, Any]) -> Any:
    from unbroken.frameworks.torch.tensors import TorchCodec

    # By way of its bytes: torch takes no array of a dtype of ml_dtypes.
    image = HostTensor(NAMES[array.dtype.name], array.shape, _bytes_of(np.ascontiguousarray(array)))
    return TorchCodec().decode_tensor(image)


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def raw(variable: Any) -> Any:
    """Return what the framework below has for a variable of Keras; another one as it is."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def tensor_differences(name: str, live: TensorSource, loaded: Any) -> list[Difference]:
    """Return how a loaded tensor differs in shape and dtype from the live one of that name."""
    if not (hasattr(loaded, "dtype") and hasattr(loaded, "shape")):
        text = f"expected a tensor, the checkpoint holds a {type(loaded).__name__}"
        return [Difference("other", name, text)]
    found = []
    if tuple(loaded.shape) != live.shape:
        text = f"shape {live.shape}, the checkpoint has shape {tuple(loaded.shape)}"
        found.append(Difference("shape", name, text))
    if loaded.dtype != live.dtype:
        mine, theirs = known_name(live.dtype), known_name(str(loaded.dtype))
        found.append(Difference("dtype", name, f"dtype {mine}, the checkpoint has dtype {theirs}"))
    return found


def number_of(value: Any) -> float:
    """Return a number of the framework below as a plain one: the shortest that it can be made of again."""
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(str(array)) if array.dtype == np.float32 else float(array)
