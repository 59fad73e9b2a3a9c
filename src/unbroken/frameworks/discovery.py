"""What a script holds beside the parts of its run: found by a walk from its modules and running functions.

Three kinds are told apart: random generators, objects with `state_dict` and `load_state_dict`, and plain
variables: numbers, texts, tensors and containers of these. Each is known by its place, such as
`__main__.augment.rng` or `train.patience`, and looked up afresh each time.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal

from unbroken.frameworks.generators import HeldGenerators, is_generator
from unbroken.frameworks.places import Place, Roots, Step, attributes_of, user_frames
from unbroken.state.python import StateDictHandler

Kind = Literal["generator", "stateful", "plain"]

# Nearest objects come first: these bounds cut off what is far from the script's own names.
_MOST_OBJECTS = 50_000
_MOST_FOUND = 1_000
# Longer containers are data.
_MOST_ITEMS = 10_000
_LONGEST_TEXT = 10_000
_DEEPEST = 20
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PLAIN_CONTAINERS = (*_CONTAINERS, OrderedDict, defaultdict, Counter)
_OPAQUE = (types.ModuleType, types.CodeType, types.FrameType, range, bytearray, memoryview)
# Where objects of TensorFlow and Keras have what is the user's, among much that is theirs.
_OF_TENSORFLOW = ("_layers", "_python_function")
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_OWN = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object of the script whose state may change: what kind it is, and where."""

    name: str
    kind: Kind
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All that was found, and what was not looked at, in words."""

    found: tuple[Found, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Visit:
    name: str
    place: Place
    value: Any
    is_of_user: bool


def discover(live: Roots, known: Container[int]) -> Discovery:
    """Walk from the variables of the script; objects whose id is `known` are left out."""
    walk = _Walk(known)
    walk.run(live)
    return Discovery(found=tuple(walk.found.values()), notes=tuple(walk.notes))


def script_modules() -> dict[str, dict[str, Any]]:
    """Return the variables of the user's own modules by their names, of `__main__` first."""
    modules = {name: vars(module) for name, module in list(sys.modules.items()) if _is_of_user(module, name)}
    return {name: modules[name] for name in sorted(modules, key=lambda name: (name != "__main__", name))}


def script_roots(modules: Mapping[str, dict[str, Any]]) -> Roots:
    """Return the variables of `modules` and of the script's functions that run now."""
    return Roots(modules, user_frames(is_of_library))


def is_of_library(module: str | None) -> bool:
    """Tell whether a module of that name is not the user's own: installed, of Python, or of ours."""
    if module == "__main__":
        return False
    name = module or "builtins"
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names:
        return True
    files = [getattr(sys.modules.get(module), "__file__", None) for module in (root, name)]
    return files[1] is None or any(_is_installed(file) for file in files if file is not None)


def _is_installed(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, _OWN)) or any(place in file for place in _INSTALLED)


def _is_of_user(module: object, name: str) -> bool:
    # To processes of their own the script goes by another name, which is `__main__` here.
    return isinstance(module, types.ModuleType) and name != "__mp_main__" and not is_of_library(name)


class _Walk:
    """One walk, breadth first: the shortest way to an object names it."""

    def __init__(self, known: Container[int]) -> None:
        self.found: dict[str, Found] = {}
        self.notes: list[str] = []
        self._known = known
        # Objects, not only their ids: the id of one that is gone may be given to another.
        self._seen: dict[int, object] = {}
        self._todo: deque[_Visit] = deque()

    def run(self, live: Roots) -> None:
        # What a function holds is known there by the name that its user gave it.
        order = sorted(live.variables, key=lambda root: (root != "__main__", root in live.modules))
        for root in order:
            variables = live.variables[root]
            for name, value in list(variables.items()):
                if not name.startswith("__"):
                    place = Place(root, (Step("variable", name),))
                    self._todo.append(_Visit(f"{root}.{name}", place, value, is_of_user=True))
        while self._todo:
            if len(self._seen) > _MOST_OBJECTS or len(self.found) >= _MOST_FOUND:
                self.notes.append(
                    f"looked for objects in no part among the nearest {len(self._seen)} only, "
                    f"found {len(self.found)}"
                )
                return
            self._visit(self._todo.popleft())

    def _visit(self, visit: _Visit) -> None:
        value = visit.value
        if isinstance(value, _SCALARS):
            if visit.is_of_user and not (isinstance(value, str | bytes) and len(value) > _LONGEST_TEXT):
                self._note(visit, "plain")
            return
        if id(value) in self._known or id(value) in self._seen or isinstance(value, _OPAQUE):
            return
        self._seen[id(value)] = value
        if is_generator(value):
            # Those that everybody shares are held by nobody.
            if not isinstance(value, SystemRandom) and HeldGenerators({"it": value}).paths:
                self._note(visit, "generator")
        elif _is_array(value):
            if visit.is_of_user:
                self._note(visit, "plain")
        elif isinstance(value, _CONTAINERS):
            self._visit_container(visit)
        else:
            self._visit_object(visit)

    def _visit_container(self, visit: _Visit) -> None:
        value = visit.value
        if len(value) > _MOST_ITEMS:
            self.notes.append(f"not looked into: {visit.name}, which has {len(value)} items")
        elif not visit.is_of_user or not _is_plain(value):
            self._go_into(visit, _items(value), is_of_user=visit.is_of_user)
        else:
            self._note(visit, "plain")

    def _visit_object(self, visit: _Visit) -> None:
        value = visit.value
        if isinstance(value, type):
            if not is_of_library(value.__module__):
                self._go_into(visit, attributes_of(value), is_of_user=True)
            return
        module = type(value).__module__
        if module.partition(".")[0] == "unbroken":
            return
        # Functions and generators that are not the user's are not gone into at all.
        is_of_user = isinstance(value, types.FunctionType | types.GeneratorType) or not is_of_library(module)
        is_of_user = is_of_user or _is_instance(value, "torch.utils.data", "Sampler")
        if StateDictHandler().accepts(value):
            self._note(visit, "stateful")
            if not is_of_user or _is_instance(value, "torch.nn", "Module"):
                return
        self._go_into(visit, _inside(value), is_of_user=is_of_user)

    def _go_into(self, visit: _Visit, children: Iterator[tuple[str, Step, Any]], *, is_of_user: bool) -> None:
        for label, step, child in children:
            place = Place(visit.place.root, (*visit.place.steps, step))
            self._todo.append(_Visit(visit.name + label, place, child, is_of_user))

    def _note(self, visit: _Visit, kind: Kind) -> None:
        name = visit.name if visit.name not in self.found else _numbered(visit.name, self.found)
        self.found[name] = Found(name=name, kind=kind, place=visit.place)


def _numbered(name: str, taken: Container[str]) -> str:
    return next(other for number in count(2) if (other := f"{name}#{number}") not in taken)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether `value` consists of numbers, texts, tensors and containers of these."""
    if isinstance(value, _SCALARS) or _is_array(value):
        return True
    if type(value) not in _PLAIN_CONTAINERS or depth > _DEEPEST or len(value) > _MOST_ITEMS:
        return False
    if isinstance(value, dict) and not all(isinstance(key, _SCALARS) for key in value):
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_plain(item, depth + 1) for item in items)


def _is_array(value: Any) -> bool:
    if _is_instance(value, "numpy", "ndarray"):
        return bool(value.dtype != object)
    if _is_instance(value, "tensorflow", "Variable") or _is_instance(value, "tensorflow", "Tensor"):
        return True
    return _is_instance(value, "torch", "Tensor") or _is_instance(value, "numpy", "generic")


def _is_instance(value: object, module: str, name: str) -> bool:
    # Only a library that is loaded can have made the value; asking never imports one.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _items(container: Any) -> Iterator[tuple[str, Step, Any]]:
    if isinstance(container, dict):
        for position, (key, item) in enumerate(container.items()):
            # Other keys may print their address, which is another one in every process.
            label = f"[{key!r}]" if isinstance(key, str | int) else f"[key {position}]"
            yield label, Step("key", key), item
    elif isinstance(container, list | tuple | deque):
        for position, item in enumerate(container):
            yield f"[{position}]", Step("item", position), item


def _inside(value: Any) -> Iterator[tuple[str, Step, Any]]:
    if isinstance(value, types.FunctionType):
        if not is_of_library(value.__module__):
            yield from _of_function(value)
    elif isinstance(value, types.GeneratorType):
        yield from _of_suspended(value)
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        yield ".__self__", Step("attribute", "__self__"), value.__self__
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", Step("attribute", name), getattr(value, name)
    elif _is_instance(value, "numpy", "ndarray"):
        for position, item in enumerate(value.reshape(-1)[:_MOST_ITEMS]):
            yield f"[{position}]", Step("flat", position), item
    elif type(value).__module__.partition(".")[0] in ("tensorflow", "keras"):
        # What the user has put there; the rest is graphs and caches.
        yield from (
            child
            for child in attributes_of(value)
            if child[1].key in _OF_TENSORFLOW or not str(child[1].key).startswith("_")
        )
    else:
        # Those named so are TensorFlow's notes on what it tracks.
        yield from (child for child in attributes_of(value) if not child[0].startswith("._self_"))


def _of_suspended(generator: types.GeneratorType[Any, Any, Any]) -> Iterator[tuple[str, Step, Any]]:
    frame = generator.gi_frame
    if frame is not None and not is_of_library(frame.f_globals.get("__name__")):
        for name, item in frame.f_locals.items():
            yield f"().{name}", Step("suspended", name), item


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Step, Any]]:
    for position, cell in enumerate(function.__closure__ or ()):
        try:
            item = cell.cell_contents
        except ValueError:
            continue  # the enclosing function has not assigned this variable yet
        yield f"<{function.__code__.co_freevars[position]}>", Step("cell", position), item
    defaults: Mapping[str, Any] = {"__defaults__": function.__defaults__, "__dict__": vars(function)}
    for name, item in defaults.items():
        if item:
            yield f".{name}", Step("attribute", name), item
