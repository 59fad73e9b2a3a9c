"""Single variables of Keras and generators of seeds, as parts of their own."""

from __future__ import annotations

from typing import Any

import keras

from unbroken.frameworks.keras.tensors import fill, source_of, tensor_differences
from unbroken.state.handlers import ORDER_GENERATOR, ORDER_VALUE, Difference


class VariableHandler:
    """`keras.Variable`, filled in place."""

    name = "keras.variable"
    order = ORDER_VALUE

    def accepts(self, value: object) -> bool:
        return isinstance(value, keras.Variable)

    def state(self, value: Any) -> object:
        return source_of(value)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return tensor_differences("", source_of(value), state)

    def restore(self, value: Any, state: Any) -> None:
        # One of another shape was allowed: it stays as it is.
        if tuple(value.shape) == tuple(state.shape):
            fill(value, state)


class SeedHandler:
    """`keras.random.SeedGenerator`: the state that it counts up with each use."""

    name = "keras.seed"
    order = ORDER_GENERATOR

    def accepts(self, value: object) -> bool:
        return isinstance(value, keras.random.SeedGenerator)

    def state(self, value: Any) -> object:
        return source_of(value.state)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return tensor_differences("", source_of(value.state), state)

    def restore(self, value: Any, state: Any) -> None:
        fill(value.state, state)
