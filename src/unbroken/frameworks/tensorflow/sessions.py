"""Sessions of graph mode: all variables of the graph, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.dtypes import numpy_dtype
from unbroken.frameworks.tensorflow.tensors import ArrayTensor, dtype_name
from unbroken.state.handlers import ORDER_MODULE, Difference, TensorFacts


class SessionHandler:
    """A `tf.compat.v1.Session`: every variable of its graph, global and local.

    Shapes and dtypes are compared here before anything is assigned. TensorFlow itself puts a tensor of one
    shape into a variable of another in graph mode, without a word.
    """

    name = "tensorflow.session"
    order = ORDER_MODULE
    tensor_facts = TensorFacts()

    def accepts(self, value: object) -> bool:
        return isinstance(value, tf.compat.v1.Session | tf.compat.v1.InteractiveSession)

    def state(self, value: Any) -> object:
        variables = _variables(value)
        try:
            arrays = value.run(variables)
        except tf.errors.FailedPreconditionError as error:
            raise UnsupportedStateError(
                "a session with variables that have no value yet",
                hint="run tf.compat.v1.global_variables_initializer(), and that of local variables, "
                "before the run starts",
            ) from error
        return {
            name: ArrayTensor(array, is_trained=variables[name].trainable) for name, array in arrays.items()
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live = _variables(value)
        found = [Difference("missing", name, "the checkpoint lacks it") for name in live if name not in state]
        found += [Difference("unexpected", name, "the graph lacks it") for name in state if name not in live]
        for name in live.keys() & state.keys():
            found += _tensor_differences(name, live[name], state[name])
        return found

    def restore(self, value: Any, state: Any) -> None:
        fed = {}
        for name, variable in _variables(value).items():
            saved = state.get(name)
            if saved is not None and variable.shape.is_compatible_with(saved.shape):
                array = np.frombuffer(saved.data, dtype=numpy_dtype(saved.dtype)).reshape(saved.shape)
                fed[variable.initializer] = array.astype(variable.dtype.as_numpy_dtype)
        # The initializers are fed, so that nothing is added to a graph that may be finalized.
        value.run([*fed], {initializer.inputs[1]: array for initializer, array in fed.items()})


def _variables(session: Any) -> dict[str, Any]:
    with session.graph.as_default():
        both = (*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables())
    found = {variable.op.name: variable for variable in both}
    if not found:
        raise UnsupportedStateError(
            "a session whose graph has no variables yet", hint="build the graph before the run starts"
        )
    return found


def _tensor_differences(name: str, variable: Any, saved: Any) -> list[Difference]:
    found = []
    shape, dtype = tuple(saved.shape), dtype_name(variable.dtype)
    if not variable.shape.is_compatible_with(shape):
        text = f"shape {tuple(variable.shape)}, the checkpoint has shape {shape}"
        found.append(Difference("shape", name, text))
    if saved.dtype != dtype:
        found.append(Difference("dtype", name, f"dtype {dtype}, the checkpoint has dtype {saved.dtype}"))
    return found
