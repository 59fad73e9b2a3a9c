"""What TensorFlow would save of a live object: the objects below it, and the variables in these."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from typing import Any

import tensorflow as tf

from unbroken.frameworks.tensorflow.distributed import is_variable

# Lists in which an optimizer has, in the order they were made, its own variables, and those that it trains.
OWN_LISTS = frozenset({"_variables", "_all_variables"})
TRAINED = "_trainable_variables"


def children_of(value: object) -> Mapping[str, Any]:
    """Return what TensorFlow would save below an object, by its names there."""
    if type(value) is dict:
        return {str(key): item for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {str(index): item for index, item in enumerate(value)}
    try:
        found: Mapping[str, Any] = tf.train.TrackableView.children(value)
    except (AttributeError, TypeError, ValueError):
        # No object that TensorFlow could keep.
        return {}
    return found


def variable_of(value: Any) -> Any:
    """Return the variable that `value` is, or is Keras' name for; None if it is none."""
    if is_variable(value):
        return value
    inner = getattr(value, "value", None)
    return inner if not callable(inner) and is_variable(inner) else None


def live_variables(value: object, apart: Container[int] = ()) -> list[tuple[str, Any]]:
    """Return the variables below an object, each once, by the shortest way; not what it trains.

    Objects whose identity is among `apart` are not gone into.
    """
    found: list[tuple[str, Any]] = []
    seen: dict[int, object] = {}
    waiting = deque([("", value)])
    while waiting:
        name, live = waiting.popleft()
        variable = variable_of(live)
        key = id(live if variable is None else variable)
        if key in seen:
            continue
        seen[key] = live
        if variable is not None:
            found.append((name, variable))
            continue
        inner = [(child, item) for child, item in children_of(live).items() if child != TRAINED]
        inner = [(child, item) for child, item in inner if id(item) not in apart]
        waiting.extend((joined(name, child), item) for child, item in sorted(inner, key=_lists_last))
    return found


def _lists_last(item: tuple[str, Any]) -> bool:
    return item[0] in OWN_LISTS


def joined(name: str, child: str) -> str:
    """Return the name of what an object called `name` has as its `child`."""
    return f"{name}.{child}" if name else child
