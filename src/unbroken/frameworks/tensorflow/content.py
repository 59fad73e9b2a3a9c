"""What an object of TensorFlow consists of: a walk over attributes and items, by structure, never by name."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from unbroken.frameworks.discovery import is_of_library
from unbroken.frameworks.tensorflow.distributed import is_variable
from unbroken.frameworks.tensorflow.tables import is_mutable_table

_OF_MODULES = frozenset(vars(tf.Module()))
# What those that track their attributes keep about that.
_TRACKING = "_self_"
_AutoTrackable = tf.__internal__.tracking.AutoTrackable
Trackable = tf.__internal__.tracking.Trackable
_FUNCTIONS = (
    tf.types.experimental.PolymorphicFunction,
    tf.types.experimental.Callable,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    type,
    types.ModuleType,
)


@dataclass(slots=True)
class Content:
    """What was found below an object, by dotted paths such as `encoder.layers.0.kernel`.

    A variable has each of the names by which objects hold it, an object the shortest one only. `owners` are
    the objects and containers whose other attributes and items are looked at, too. `unknown` may have a
    state that is not kept, `unbuilt` have yet to make their variables.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, object] = field(default_factory=dict)
    unbuilt: list[str] = field(default_factory=list)


def content_of(root: object) -> Content:
    """Walk from `root`, nearest first and by sorted names, so that the order of assignments is no matter."""
    found = Content()
    seen: dict[int, object] = {id(root): root}
    todo: deque[tuple[str, Any]] = deque([("", root)])
    while todo:
        path, owner = todo.popleft()
        _note_owner(path, owner, found)
        for label, child in children_of(owner):
            name = _free(f"{path}.{label}" if path else label, found)
            if is_variable(child):
                found.variables[name] = child
            elif id(child) not in seen and not isinstance(child, _FUNCTIONS):
                seen[id(child)] = child
                if _is_gone_into(child):
                    todo.append((name, child))
                else:
                    _note(name, child, found)
    return found


def _note_owner(path: str, owner: object, found: Content) -> None:
    if not is_closed(owner):
        # What a tf.train.Checkpoint has beside what it was given is its own.
        if not isinstance(owner, tf.train.Checkpoint):
            found.owners[path] = owner
    elif getattr(owner, "built", True) is False:
        found.unbuilt.append(path)


def _note(name: str, child: object, found: Content) -> None:
    if is_mutable_table(child):
        found.tables[name] = child
    elif _may_have_state(child):
        found.unknown[name] = child


def is_closed(value: object) -> bool:
    """Tell whether `value` is of Keras, which knows its own variables."""
    return any(cls.__module__.partition(".")[0] in ("keras", "tf_keras") for cls in type(value).__mro__)


def is_open(value: object) -> bool:
    """Tell whether what `value` consists of is in its attributes, and it is there to be trained."""
    is_tracked = isinstance(value, _AutoTrackable) and not isinstance(value, tf.random.Generator)
    return is_tracked and not is_closed(value)


def children_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `owner` holds, each with its label."""
    if isinstance(owner, Mapping):
        yield from sorted(((str(key), item) for key, item in owner.items()), key=_label)
    elif isinstance(owner, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(owner))
    elif is_closed(owner):
        yield from _variables_of_keras(owner)
    elif isinstance(owner, tf.train.Checkpoint):
        # Made when it is first asked for: made now, it is there at each start.
        _ = owner.save_counter
        yield from sorted(tf.train.TrackableView(owner).children(owner).items(), key=_label)
    else:
        yield from sorted(attributes_of(owner), key=_label)


def attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the user's code has given an object."""
    return (
        (name, item)
        for name, item in vars(owner).items()
        if not name.startswith(_TRACKING) and name not in _OF_MODULES
    )


def _variables_of_keras(owner: Any) -> Iterator[tuple[str, Any]]:
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


def _is_gone_into(value: object) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return _holds_objects(value)
    if is_open(value) or is_closed(value):
        return True
    cls = type(value)
    has_own_state = callable(getattr(value, "state_dict", None))
    return hasattr(value, "__dict__") and not is_of_library(cls.__module__) and not has_own_state


def _holds_objects(container: Any, depth: int = 5) -> bool:
    """Tell whether anything below a container may have variables; the others are plain values as a whole."""
    items = container.values() if isinstance(container, Mapping) else container
    for item in items:
        if isinstance(item, Mapping | list | tuple):
            if depth and _holds_objects(item, depth - 1):
                return True
        elif is_variable(item) or is_mutable_table(item) or _is_gone_into(item):
            return True
    return False


def _may_have_state(value: object) -> bool:
    is_plain = isinstance(value, Mapping | list | tuple | tf.random.Generator)
    is_static = "lookup" in type(value).__module__ or "asset" in type(value).__module__
    return isinstance(value, Trackable) and not is_plain and not is_static


def _free(name: str, found: Content) -> str:
    # Keys 1 and "1" of one dictionary.
    while name in found.variables or name in found.tables:
        name += "'"
    return name


def _label(child: tuple[str, Any]) -> str:
    return child[0]
