"""Attributes of callbacks that are filled in place: random generators, metrics, variables."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from unbroken.errors import StateMismatchError
from unbroken.frameworks.generators import generator_state, is_generator, set_generator_state


def is_variable(value: object) -> bool:
    """Tell whether `value` is a variable of Keras or TensorFlow."""
    tensorflow = sys.modules.get("tensorflow")
    return isinstance(value, keras.Variable) or (
        tensorflow is not None and isinstance(value, tensorflow.Variable)
    )


def live_state(value: Any) -> dict[str, Any] | None:
    """Return the state of an object that is filled in place, or None if it is no such object."""
    if is_generator(value):
        return {"generator": generator_state(value)}
    variables = _variables(value)
    return None if variables is None else {"variables": [_array(variable) for variable in variables]}


def put_live(name: str, value: Any, state: dict[str, Any]) -> None:
    """Put `value` into a state. Raises StateMismatchError if it is another kind of object than was kept."""
    if "generator" in state:
        fits = is_generator(value) and generator_state(value)["kind"] == state["generator"]["kind"]
        if fits:
            set_generator_state(value, state["generator"])
    else:
        variables, saved = _variables(value), state["variables"]
        shapes = None if variables is None else [tuple(variable.shape) for variable in variables]
        fits = shapes == [array.shape for array in saved]
        for variable, array in zip(variables or () if fits else (), saved if fits else (), strict=True):
            variable.assign(array)
    if not fits:
        raise StateMismatchError(
            f"fit.{name}: expected what the checkpoint has, a {next(iter(state)).rstrip('s')} or a metric of "
            f"the same shapes, found a {type(value).__name__}",
            hint="give fit the callbacks that the run began with",
        )


def _variables(value: Any) -> list[Any] | None:
    if isinstance(value, keras.metrics.Metric):
        return list(value.variables)
    return [value] if is_variable(value) else None


def _array(variable: Any) -> Any:
    # A copy: on the CPU the array may lie over the memory of the variable.
    return np.array(
        keras.ops.convert_to_numpy(variable) if isinstance(variable, keras.Variable) else variable
    )
