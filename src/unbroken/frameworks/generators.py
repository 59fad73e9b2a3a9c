"""Random generators that user objects hold: where they are, and their states as plain values.

A dataset with `self.rng = numpy.random.default_rng(7)` draws from a generator that no global state covers.
`HeldGenerators` finds such generators by walking plain data: attributes, slots, containers, closures, bound
methods, class attributes, and the module-level names that the user's functions read. A generator is known by
its path (`dataset.transform.rng`) and looked up afresh each time, so one that was replaced is still the right
one.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.rng import (
    numpy_state,
    plain_numpy_state,
    plain_python_state,
    plain_torch_state,
    python_state,
    torch_state,
)

# Longer containers are data, not parts of an object. Nearest objects come first, so the second bound
# cuts off only what is far from the root.
_LONGEST_CONTAINER = 10_000
_MOST_OBJECTS = 200_000
_ATOMS = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    type,
    range,
    types.ModuleType,
    types.CodeType,
)
_FRAMEWORKS = frozenset({"torch", "numpy", "tensorflow", "keras", "unbroken"})
# Where the generators of TensorFlow come from: `tensorflow` itself loads its names when they are asked for.
_OF_TENSORFLOW = "tensorflow.python.ops.stateful_random_ops"
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class _Step:
    """How to get from an object to one that it holds."""

    kind: str
    key: Any

    def take(self, holder: Any) -> Any:
        match self.kind:
            case "attribute":
                return getattr(holder, self.key)
            case "instance":
                return holder.__dict__[self.key]
            case "class":
                return _class_attributes(type(holder))[self.key]
            case "key":
                # Indexing would fill in a missing key of a defaultdict.
                # TensorFlow stands a proxy in front of dictionaries.
                return dict.get(getattr(holder, "__wrapped__", holder), self.key)
            case "cell":
                return holder.__closure__[self.key].cell_contents
            case "global":
                return holder.__globals__[self.key]
            case "flat":
                return holder.reshape(-1)[self.key]
        return holder[self.key]


@dataclass(frozen=True, slots=True)
class _Place:
    steps: tuple[_Step, ...]

    def look(self, root: object) -> object:
        for step in self.steps:
            try:
                root = step.take(root)
            except (AttributeError, LookupError, ValueError):
                return None
        return root


class HeldGenerators:
    """The generators that named objects hold.

    Generators that everybody shares (numpy's legacy global, torch's default, python's `random`) are left out:
    `capture_global_rng` has them.

        held = HeldGenerators({"dataset": dataset})
        states = held.capture()                     # {"dataset.rng": {"kind": "numpy.Generator", ...}}
        held.restore(states)

    Raises:
        UnsupportedStateError: a generator lies in a set, which has no order, or has no state to keep.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self._places = _find(self._roots)

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the generators are, sorted."""
        return tuple(self._places)

    def objects(self) -> list[object]:
        """Return the generators themselves, in the order of `paths`."""
        return [self._generator(path) for path in self._places]

    def capture(self) -> dict[str, object]:
        """Return the states by path, as plain values.

        Raises:
            UnsupportedStateError: a generator that was there is gone.
        """
        return {path: generator_state(self._generator(path)) for path in self._places}

    def restore(self, states: Mapping[str, object]) -> None:
        """Put the generators into `states`.

        Raises:
            StateMismatchError: not the same generators, by path or by kind. Nothing was changed.
        """
        problems = [
            f"{path} has a saved state but is not here" for path in states if path not in self._places
        ]
        problems += [f"{path} has no saved state" for path in self._places if path not in states]
        generators = {path: self._generator(path) for path in self._places}
        for path in self._places.keys() & states.keys():
            saved, found = _saved_kind(states[path]), _saved_kind(generator_state(generators[path]))
            if saved != found:
                problems.append(f"{path}: checkpoint has a {saved}, found a {found}")
        if problems:
            raise StateMismatchError(
                "held random generators: " + "; ".join(sorted(problems)),
                hint="build the same objects as the original run, or start a new run directory",
            )
        for path, generator in generators.items():
            set_generator_state(generator, states[path])

    def look_again(self) -> tuple[str, ...]:
        """Return the paths of generators that were not there before; they are not taken over."""
        return tuple(path for path in _find(self._roots) if path not in self._places)

    def _generator(self, path: str) -> object:
        generator = self._places[path].look(self._roots)
        if not is_generator(generator):
            raise UnsupportedStateError(
                f"{path}: expected the random generator that was there, found {type(generator).__name__}",
                hint="keep the generator where it is for the whole run; reseed or replace it in place",
            )
        return generator


def is_generator(value: object) -> bool:
    """Return whether `value` is an object whose draws depend on a state of its own."""
    return isinstance(value, _generator_types())


def is_kind_of_generator(kind: type) -> bool:
    """Return whether objects of this class are random generators; none is asked anything."""
    return not set(map(id, _generator_types())).isdisjoint(map(id, kind.__mro__))


def generator_state(generator: Any) -> dict[str, object]:
    """Return the state of one generator as plain values, with its kind."""
    if isinstance(generator, random.Random):
        return {"kind": "random.Random", "state": plain_python_state(generator.getstate())}
    if _is_instance(generator, "torch", "Generator"):
        kind = f"torch.Generator on {generator.device.type}"
        return {"kind": kind, "state": plain_torch_state(generator.get_state())}
    if _is_instance(generator, _OF_TENSORFLOW, "Generator"):
        kind = f"tf.random.Generator of algorithm {int(generator.algorithm)}"
        return {"kind": kind, "state": _tensorflow_rng().generator_state(generator)}
    if _is_instance(generator, "numpy.random", "Generator"):
        return {"kind": "numpy.Generator", "state": plain_numpy_state(generator.bit_generator.state)}
    if _is_instance(generator, "numpy.random", "RandomState"):
        return {"kind": "numpy.RandomState", "state": plain_numpy_state(generator.get_state(legacy=False))}
    return {"kind": "numpy.BitGenerator", "state": plain_numpy_state(generator.state)}


def set_generator_state(generator: Any, state: object) -> None:
    """Put one generator into a state that `generator_state` returned for one of the same kind."""
    plain = cast("Mapping[str, object]", state)["state"]
    if isinstance(generator, random.Random):
        generator.setstate(python_state(plain))
    elif _is_instance(generator, "torch", "Generator"):
        generator.set_state(torch_state(plain))
    elif _is_instance(generator, _OF_TENSORFLOW, "Generator"):
        _tensorflow_rng().set_generator_state(generator, plain)
    elif _is_instance(generator, "numpy.random", "Generator"):
        generator.bit_generator.state = numpy_state(plain)
    elif _is_instance(generator, "numpy.random", "RandomState"):
        generator.set_state(numpy_state(plain))
    else:
        generator.state = numpy_state(plain)


def _tensorflow_rng() -> Any:
    return importlib.import_module("unbroken.frameworks.tensorflow.rng")


def _saved_kind(state: object) -> str:
    fields = cast("Mapping[str, Any]", state)
    algorithm = fields["state"].get("bit_generator") if isinstance(fields["state"], dict) else None
    return f"{fields['kind']} ({algorithm})" if algorithm else str(fields["kind"])


def _is_instance(value: object, module: str, name: str) -> bool:
    # Only a library that is loaded can have made the value; asking never imports one.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _generator_types() -> tuple[type, ...]:
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    found: list[type] = [random.Random]
    if numpy is not None:
        found += [numpy.Generator, numpy.RandomState, numpy.BitGenerator]
    if torch is not None:
        found.append(torch.Generator)
    if _OF_TENSORFLOW in sys.modules:
        found.append(sys.modules[_OF_TENSORFLOW].Generator)
    return tuple(found)


def _shared_generators() -> dict[int, object]:
    shared: list[Any] = [cast("Any", random.random).__self__]
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None:
        shared += [numpy.rand.__self__, numpy.get_bit_generator()]
    if torch is not None:
        shared.append(torch.default_generator)
        shared += torch.cuda.default_generators
    if _OF_TENSORFLOW in sys.modules:
        shared.append(sys.modules[_OF_TENSORFLOW].global_generator)
    return {id(generator): generator for generator in shared}


def _find(roots: dict[str, object]) -> dict[str, _Place]:
    """Walk breadth first; the shortest path to an object names it, the earlier one of two."""
    kinds, found = _generator_types(), dict[str, _Place]()
    # Objects, not only their ids: the id of one that is gone may be given to another.
    seen = _shared_generators()
    todo: deque[tuple[str, tuple[_Step, ...], object]] = deque()
    todo.extend((name, (_Step("key", name),), root) for name, root in roots.items())
    while todo and len(seen) < _MOST_OBJECTS:
        path, steps, value = todo.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, kinds):
            _check_has_state(path, steps, value)
            found[path] = _Place(steps)
            continue
        todo.extend((path + label, (*steps, step), child) for label, step, child in _children(value))
    return dict(sorted(found.items()))


def _check_has_state(path: str, steps: tuple[_Step, ...], generator: object) -> None:
    if any(step.kind == "member" for step in steps):
        raise UnsupportedStateError(
            f"{path}: expected random generators in an order, found one in a set",
            hint="hold the generators in a list or a dict",
        )
    if isinstance(generator, random.SystemRandom):
        raise UnsupportedStateError(
            f"{path}: expected a random generator with a state, found one that asks the operating system",
            hint="use random.Random(seed) instead",
        )


def _children(value: Any) -> Iterator[tuple[str, _Step, object]]:
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return _items(value) if len(value) <= _LONGEST_CONTAINER else iter(())
    if isinstance(value, types.FunctionType):
        return _function_children(value)
    if _is_instance(value, "numpy", "ndarray"):
        is_of_objects = value.dtype == object and value.size <= _LONGEST_CONTAINER
        return _elements(value) if is_of_objects else iter(())
    if _is_instance(value, "torch", "Tensor"):
        return iter(())
    if type(value).__module__.partition(".")[0] in ("tensorflow", "keras"):
        return _of_tensorflow(value)
    return _attributes(value)


def _of_tensorflow(value: Any) -> Iterator[tuple[str, _Step, object]]:
    """What the user has put into objects of a class of TensorFlow or Keras; the rest is graphs and caches."""
    for name, item in getattr(value, "__dict__", {}).items():
        if name in ("_layers", "_python_function") or not name.startswith("_"):
            yield f".{name}", _Step("instance", name), item


def _items(container: Any) -> Iterator[tuple[str, _Step, object]]:
    if isinstance(container, dict):
        for position, (key, item) in enumerate(container.items()):
            # Other keys may print their address, which is another one in every process.
            label = repr(key) if isinstance(key, (str, int)) else f"key {position}"
            yield f"[{label}]", _Step("key", key), item
    elif isinstance(container, (list, tuple)):
        for position, item in enumerate(container):
            yield f"[{position}]", _Step("item", position), item
    else:
        for item in container:
            yield "{}", _Step("member", None), item


def _elements(array: Any) -> Iterator[tuple[str, _Step, object]]:
    for position, item in enumerate(array.reshape(-1)):
        yield f"[{position}]", _Step("flat", position), item


def _function_children(function: types.FunctionType) -> Iterator[tuple[str, _Step, object]]:
    for position, cell in enumerate(function.__closure__ or ()):
        try:
            yield f"<{function.__code__.co_freevars[position]}>", _Step("cell", position), cell.cell_contents
        except ValueError:
            continue  # the enclosing function has not assigned this variable yet
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        yield f".{name}", _Step("attribute", name), getattr(function, name)
    if _is_of_a_library(function.__module__):
        return
    for name in _names_read(function.__code__):
        if name in function.__globals__:
            yield f":{name}", _Step("global", name), function.__globals__[name]


def _names_read(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_read(constant)
    return names


def _attributes(value: Any) -> Iterator[tuple[str, _Step, object]]:
    instance = getattr(value, "__dict__", None)
    if isinstance(instance, dict):
        for name, item in instance.items():
            yield f".{name}", _Step("instance", name), item
    names = []
    if isinstance(value, functools.partial):
        names = ["func", "args", "keywords"]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        names = ["__self__", "__func__"]
    elif isinstance(value, (staticmethod, classmethod)):
        names = ["__func__"]
    elif isinstance(value, property):
        names = ["fget"]
    for name in [*names, *_slots(type(value))]:
        with suppress(AttributeError, TypeError):  # not set, or refused by a descriptor written in C
            yield f".{name}", _Step("attribute", name), getattr(value, name)
    for name, item in _class_attributes(type(value)).items():
        yield f".{name}", _Step("class", name), item


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        declared = base.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            yield f"_{base.__name__.lstrip('_')}{name}" if _is_private(name) else name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _class_attributes(cls: type) -> dict[str, object]:
    """Attributes and methods of the user's classes; what a library's classes hold is the library's own."""
    found: dict[str, object] = {}
    for base in cls.__mro__:
        if not _is_of_a_library(base.__module__):
            for name, item in base.__dict__.items():
                found.setdefault(name, item)
    return found


def _is_of_a_library(module: str | None) -> bool:
    name = module or "builtins"
    root = name.partition(".")[0]
    if root in _FRAMEWORKS or root in sys.stdlib_module_names:
        return True
    origin = getattr(sys.modules.get(name), "__file__", None) or ""
    return not _INSTALLED.isdisjoint(PurePath(origin).parts)
