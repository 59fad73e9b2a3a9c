"""What an object of TensorFlow consists of: a walk over attributes and items, by structure, never by name."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from unbroken.frameworks.discovery import is_of_library
from unbroken.frameworks.tensorflow.closed import (
    is_closed,
    layers_of_user,
    optimizers_of,
    own_attributes,
    variables_of_keras,
)
from unbroken.frameworks.tensorflow.distributed import is_variable
from unbroken.frameworks.tensorflow.tables import is_mutable_table

_OF_MODULES = frozenset(vars(tf.Module()))
# What those that track their attributes keep about that.
_TRACKING = "_self_"
_AutoTrackable = tf.__internal__.tracking.AutoTrackable
Trackable = tf.__internal__.tracking.Trackable
_SEQUENCES = (list, tuple, deque)
_FUNCTIONS = (
    tf.types.experimental.PolymorphicFunction,
    tf.types.experimental.Callable,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    type,
    types.ModuleType,
)


@dataclass(frozen=True, slots=True)
class ModelOptimizer:
    """An optimizer that is an attribute of a model of Keras, and where that is."""

    path: str
    model: object
    optimizer: object


@dataclass(slots=True)
class Content:
    """What was found below an object, by dotted paths such as `encoder.layers.0.kernel`.

    A variable has each of the names by which objects hold it, an object the shortest one only. `owners` are
    the objects and containers whose other attributes and items are looked at, too. `unknown` may have a
    state that is not kept, `unbuilt` have yet to make their variables, `optimizers` are those of
    models, `seen` is all that was looked at, by who it is.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, object] = field(default_factory=dict)
    unbuilt: list[str] = field(default_factory=list)
    optimizers: list[ModelOptimizer] = field(default_factory=list)
    seen: dict[int, object] = field(default_factory=dict)


def content_of(root: object) -> Content:
    """Walk from `root`, nearest first and by sorted names, so that the order of assignments is no matter."""
    found = Content()
    found.seen[id(root)] = root
    todo: deque[tuple[str, Any]] = deque([("", root)])
    while todo:
        path, owner = todo.popleft()
        _note_owner(path, owner, found)
        todo += _taken(path, children_of(owner), found)
        if is_closed(owner):
            todo += _beside(path, owner, found)
    return found


def _taken(path: str, children: Iterable[tuple[str, Any]], found: Content) -> list[tuple[str, Any]]:
    """Note what an object holds, and return that of it which is to be gone into."""
    inner = []
    for label, child in children:
        name = _free(_joined(path, label), found)
        if is_variable(child):
            found.variables[name] = child
        elif id(child) not in found.seen and not isinstance(child, _FUNCTIONS):
            found.seen[id(child)] = child
            if _is_gone_into(child):
                inner.append((name, child))
            else:
                _note(name, child, found)
    return inner


def _beside(path: str, owner: object, found: Content) -> list[tuple[str, Any]]:
    """Do the same for what is on objects of Keras, and is none of the variables that these know."""
    known = {id(variable) for variable in found.variables.values()}
    inner = []
    for place, layer in layers_of_user(owner):
        found.owners[_joined(path, place)] = layer
        own = [child for child in own_attributes(layer) if id(child[1]) not in known]
        inner += _taken(_joined(path, place), own, found)
    found.optimizers += [ModelOptimizer(path, owner, each) for each in optimizers_of(owner)]
    return inner


def _joined(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


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


def is_open(value: object) -> bool:
    """Tell whether what `value` consists of is in its attributes, and it is there to be trained."""
    is_tracked = isinstance(value, _AutoTrackable) and not isinstance(value, tf.random.Generator)
    return is_tracked and not is_closed(value)


def children_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `owner` holds, each with its label."""
    if isinstance(owner, Mapping):
        yield from sorted(((str(key), item) for key, item in owner.items()), key=_label)
    elif isinstance(owner, _SEQUENCES):
        yield from ((str(index), item) for index, item in enumerate(owner))
    elif is_closed(owner):
        yield from variables_of_keras(owner)
    elif isinstance(owner, tf.train.ExponentialMovingAverage):
        # By the order in which it was told of them: its keys are the variables themselves.
        yield from ((str(index), average) for index, average in enumerate(owner._averages.values()))
    elif isinstance(owner, tf.train.Checkpoint):
        # Made when it is first asked for: made now, it is there at each start.
        _ = owner.save_counter
        yield from sorted(tf.train.TrackableView(owner).children(owner).items(), key=_label)
    else:
        yield from sorted(attributes_of(owner), key=_label)


def attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the user's code has given an object."""
    attributes = {name: getattr(owner, name) for name in _slots(owner) if hasattr(owner, name)}
    return (
        (name, item)
        for name, item in (attributes | getattr(owner, "__dict__", {})).items()
        if not name.startswith(_TRACKING) and name not in _OF_MODULES
    )


def held_by(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the user's code keeps on `owner`, which for an object of Keras is beside its variables."""
    is_layer = is_closed(owner) and not isinstance(owner, (Mapping, *_SEQUENCES))
    return own_attributes(owner) if is_layer else children_of(owner)


def _slots(owner: object) -> Iterator[str]:
    for cls in type(owner).__mro__:
        if not is_of_library(cls.__module__):
            slots = vars(cls).get("__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            yield from (name for name in names if not name.startswith("__"))


def _is_gone_into(value: object) -> bool:
    if isinstance(value, (Mapping, *_SEQUENCES)):
        return _holds_objects(value)
    if is_open(value) or is_closed(value) or isinstance(value, tf.train.ExponentialMovingAverage):
        return True
    cls = type(value)
    has_own_state = callable(getattr(value, "state_dict", None))
    has_attributes = hasattr(value, "__dict__") or any(True for _ in _slots(value))
    return has_attributes and not is_of_library(cls.__module__) and not has_own_state


def _holds_objects(container: Any, depth: int = 5) -> bool:
    """Tell whether anything below a container may have variables; the others are plain values as a whole."""
    items = container.values() if isinstance(container, Mapping) else container
    for item in items:
        if isinstance(item, (Mapping, *_SEQUENCES)):
            if depth and _holds_objects(item, depth - 1):
                return True
        elif is_variable(item) or is_mutable_table(item) or _may_have_state(item) or _is_gone_into(item):
            return True
    return False


def _may_have_state(value: object) -> bool:
    is_plain = isinstance(value, (Mapping, *_SEQUENCES, tf.random.Generator))
    is_static = "lookup" in type(value).__module__ or "asset" in type(value).__module__
    has_own = isinstance(value, Trackable | tf.queue.QueueBase)
    return has_own and not is_plain and not is_static


def _free(name: str, found: Content) -> str:
    # Keys 1 and "1" of one dictionary.
    while name in found.variables or name in found.tables:
        name += "'"
    return name


def _label(child: tuple[str, Any]) -> str:
    return child[0]
