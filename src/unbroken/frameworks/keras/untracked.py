"""What layers hold beside variables of Keras, and what of it changes while training runs: nobody keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from unbroken.frameworks.keras.structure import dotted, places_of

# What Keras itself sets on layers and models as it goes.
_OF_KERAS = {"built", "compiled", "jit_compile", "loss", "run_eagerly", "stop_training"}
_OF_KERAS |= {"steps_per_execution", "training"}
_NUMBERS = (bool, int, float, complex, str)
_MOST_ITEMS = 100
_DEEPEST = 4


class Untracked:
    """Notes, for each model, what it held when it was first seen."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[object, dict[str, str]]] = {}

    def note(self, model: Any) -> None:
        """Note what `model` holds, if it is seen first."""
        if self._first.get(id(model), (None,))[0] is not model:
            self._first[id(model)] = (model, dict(_sights(model)))

    def changes(self, part: str, model: Any) -> list[str]:
        """Return a line for each thing that has changed since, with its full name."""
        before = self._first.get(id(model), (model, {}))[1]
        return [
            f"{dotted(part, name)}: it changes, and is no variable of Keras; hold it in a keras.Variable, or "
            "pass it as a part, a number inside a dictionary"
            for name, sight in _sights(model)
            if name in before and before[name] != sight
        ]


def _sights(model: Any) -> Iterator[tuple[str, str]]:
    for place in places_of(model):
        if isinstance(place.layer, keras.Model) or type(place.layer).__module__.partition(".")[0] != "keras":
            for attribute, value in vars(place.layer).items():
                if not attribute.startswith("_") and attribute not in _OF_KERAS:
                    yield from _inside(dotted(place.name, attribute), value, _DEEPEST)


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, keras.Layer | keras.Variable | keras.metrics.Metric):
        return
    if isinstance(value, (*_NUMBERS, np.generic)):
        yield name, repr(value)
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield name, _digest(value)
    elif keras.config.backend() == "tensorflow" and (variables := _variables_of_tensorflow(value)):
        yield name, "".join(_digest(one.numpy()) for one in variables)
    elif isinstance(value, dict | list | tuple) and depth and len(value) <= _MOST_ITEMS:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(f"{name}.{key}", item, depth - 1)


def _variables_of_tensorflow(value: Any) -> list[Any]:
    import tensorflow as tf

    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, tf.random.Generator):
        return [value.state]
    return list(value.variables) if isinstance(value, tf.Module) else []


def _digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
