"""Objects of Keras inside of modules: what they know of themselves, and what they do not."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from unbroken.frameworks.discovery import is_of_library
from unbroken.frameworks.tensorflow.distributed import is_variable

_ROOTS = ("keras", "tf_keras")


def is_closed(value: object) -> bool:
    """Tell whether `value` is of Keras, which knows its own variables."""
    return any(cls.__module__.partition(".")[0] in _ROOTS for cls in type(value).__mro__)


def variables_of_keras(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that an object of Keras knows, numbered."""
    variables = getattr(owner, "variables", None)
    if callable(variables):
        variables = variables()
    if variables is None:
        # A seed generator has one, a metric or a layer a list.
        variables = [found] if (found := getattr(owner, "state", None)) is not None else []
    for index, variable in enumerate(variables):
        # Its own name, as `kernel`: that of its layer has a number that counts the layers of the process.
        name = str(variable.name).rpartition("/")[2].partition(":")[0]
        yield f"{index}.{name}", variable if is_variable(variable) else variable.value


def layers_of_user(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers in `owner`, and itself, whose classes are not Keras's own, by their places."""
    for index, layer in enumerate(_layers(owner)):
        if not is_of_library(type(layer).__module__):
            yield f"layers.{index}", layer


def own_attributes(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the user's code keeps on a layer and Keras does not know, by sorted names.

    Of attributes whose names begin with `_` variables only: the others are as likely to be Keras's.
    """
    of_keras = _set_by_keras(layer.__class__)
    for name, item in sorted(vars(layer).items(), key=lambda attribute: attribute[0]):
        if is_variable(item) or not (name in of_keras or name.startswith("_") or _is_of_keras(item)):
            yield name, item


def optimizers_of(owner: Any) -> Iterator[Any]:
    """Yield the optimizers of a model and its layers, whose variables are none of the model's."""
    for layer in _layers(owner):
        yield from (item for item in vars(layer).values() if hasattr(type(item), "apply_gradients"))


def _layers(owner: Any) -> Iterator[Any]:
    flatten = getattr(owner, "_flatten_layers", None)
    return iter(()) if flatten is None else iter(flatten())


@functools.cache
def _set_by_keras(cls: Any) -> frozenset[str]:
    """Return the attributes that code of Keras sets on objects of `cls`: those are not the user's."""
    of_keras = [kind for kind in cls.__mro__ if kind.__module__.partition(".")[0] in _ROOTS]
    functions = [getattr(item, "fset", item) for kind in of_keras for item in vars(kind).values()]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    found = {
        str(instruction.argval)
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    }
    return frozenset(found)


def _is_of_keras(item: Any) -> bool:
    """Tell whether Keras knows `item`: an object of its own, or a container with such."""
    if isinstance(item, list | tuple | set):
        return any(_is_of_keras(each) for each in item)
    if isinstance(item, dict):
        return any(_is_of_keras(each) for each in item.values())
    return is_closed(item) or isinstance(item, tf.random.Generator)
