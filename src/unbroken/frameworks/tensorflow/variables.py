"""A variable that is a part of its own."""

from __future__ import annotations

from typing import Any

from unbroken.checkpoint.weights import REPLICAS
from unbroken.frameworks.tensorflow.distributed import Replicas, fill, is_variable
from unbroken.frameworks.tensorflow.tensors import beside_its_copies, variable_differences
from unbroken.state.handlers import ORDER_VALUE, Difference, TensorFacts

_VALUE = "value"


class VariableHandler:
    """A `tf.Variable`, filled in place, and each of its copies where these are not alike."""

    name = "tensorflow.variable"
    order = ORDER_VALUE
    tensor_facts = TensorFacts(are_streamed=True, below=_VALUE)

    def __init__(self) -> None:
        self._replicas = Replicas()

    def accepts(self, value: object) -> bool:
        return is_variable(value)

    def state(self, value: Any) -> object:
        replicas = self._replicas.state({_VALUE: value})
        return {_VALUE: beside_its_copies(value), **({REPLICAS: replicas} if replicas else {})}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return [
            *variable_differences("", value, state[_VALUE]),
            *self._replicas.differences({_VALUE: value}, state.get(REPLICAS, {})),
        ]

    def restore(self, value: Any, state: Any) -> None:
        fill(value, state[_VALUE])
        self._replicas.restore({_VALUE: value}, state.get(REPLICAS, {}))
