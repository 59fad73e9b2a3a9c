"""Places of objects in a running script: how to look there again, and how to put another value there."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from unbroken.frameworks.generators import (
    generator_state,
    is_generator,
    is_kind_of_generator,
    set_generator_state,
)

# Functions of frames deeper than this are not the script's loop over steps.
_MOST_FRAMES = 200


class GoneError(LookupError):
    """There is nothing at a place now, or nothing can be put there; the text says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """How to get from a holder to what it holds."""

    kind: str
    key: Any

    def take(self, holder: Any) -> Any:
        match self.kind:
            case "attribute":
                instance = getattr(holder, "__dict__", {})
                return instance[self.key] if self.key in instance else getattr(holder, self.key)
            case "cell":
                return holder.__closure__[self.key].cell_contents
            case "suspended":
                return holder.gi_frame.f_locals[self.key]
            case "flat":
                return holder.reshape(-1)[self.key]
            case "key":
                # Indexing would fill in a missing key of a defaultdict.
                if self.key not in holder:
                    raise KeyError(self.key)
        return holder[self.key]

    def put(self, holder: Any, value: object) -> None:
        match self.kind:
            case "attribute":
                # Past the class's own __setattr__, which may check or count.
                if not isinstance(holder, type) and self.key in getattr(holder, "__dict__", {}):
                    holder.__dict__[self.key] = value
                else:
                    setattr(holder, self.key, value)
            case "cell":
                holder.__closure__[self.key].cell_contents = value
            case "suspended":
                _put_local(holder.gi_frame, self.key, value)
            case "flat":
                holder.reshape(-1)[self.key] = value
            case _:
                holder[self.key] = value


class Roots:
    """The variables of modules, and of the functions that run now, by their names. Not to be kept."""

    def __init__(self, modules: Mapping[str, dict[str, Any]], frames: Mapping[str, types.FrameType]) -> None:
        self.modules = modules
        self.frames = frames
        # Asked for once: before Python 3.13 that is to copy all variables of the function.
        self.variables: dict[str, Mapping[str, Any]] = {
            **{name: frame.f_locals for name, frame in frames.items()},
            **modules,
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is: a module or a function, and the steps from its variables."""

    root: str
    steps: tuple[Step, ...]

    def look(self, roots: Roots) -> Any:
        """Return what is there now; raises GoneError if nothing is."""
        return _follow(self._variables(roots), self.steps)

    def put(self, roots: Roots, value: object) -> None:
        """Put `value` there; raises GoneError if it cannot be."""
        first, *rest = self.steps
        if not rest:
            if self.root in roots.modules:
                roots.modules[self.root][first.key] = value
            elif self.root in roots.frames:
                _put_local(roots.frames[self.root], first.key, value)
            return
        holder = _follow(self._variables(roots), self.steps[:-1])
        try:
            self.steps[-1].put(holder, value)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise GoneError(f"a {type(holder).__name__} cannot be changed in place: {error}") from error

    def _variables(self, roots: Roots) -> Any:
        if self.root not in roots.variables:
            raise GoneError(f"the function {self.root} is not running now")
        return roots.variables[self.root]


def _follow(holder: Any, steps: tuple[Step, ...]) -> Any:
    for step in steps:
        try:
            holder = step.take(holder)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise GoneError("it is not there any more") from error
    return holder


def user_frames(is_of_library: Callable[[str | None], bool]) -> dict[str, types.FrameType]:
    """Return the running functions of the script by their names, from the outermost in."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _MOST_FRAMES:
        # At the top level of a module the local variables are those of the module.
        if frame.f_code.co_name != "<module>" and not is_of_library(frame.f_globals.get("__name__")):
            frames.append(frame)
        frame = frame.f_back
    return {frame.f_code.co_qualname.replace(".<locals>", ""): frame for frame in reversed(frames)}


class Inventory:
    """What a loop could go over, look up in or draw random numbers from at one moment."""

    def __init__(self) -> None:
        found = gc.get_objects()
        self._objects = {id(value): weakref.ref(value) for value in _of_kinds(found, _can_be_data)}
        # Some generators are known to no collector: they are found by who holds them, and held, so that no
        # later one is given their identity.
        self._generators = {
            id(value): value
            for values in chain(_referents(found), [_local_values()])
            for value in _of_kinds(values, is_kind_of_generator)
        }

    @classmethod
    def of_now(cls) -> Inventory | None:
        """Return one, or None where the collector was told to leave objects out."""
        return None if gc.get_freeze_count() else cls()

    def has(self, value: object) -> bool:
        """Tell whether `value` was there, or is of a kind that an inventory cannot know of."""
        if is_generator(value):
            return id(value) in self._generators
        if not _is_listed(value):
            return True
        return id(value) in self._objects and self._objects[id(value)]() is value

    def has_loader(self, loader: object, generators: Sequence[object]) -> bool:
        """Tell whether a loader was there; one of a kind that is not listed is as old as its generators."""
        is_known = _is_listed(loader) or not generators
        return self.has(loader) if is_known else any(map(self.has, generators))


def _is_listed(value: object) -> bool:
    return gc.is_tracked(value) and _can_be_data(type(value))


def _can_be_data(kind: type) -> bool:
    is_read = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return is_read and bool(kind.__weakrefoffset__)


def _of_kinds(values: list[object], is_wanted: Callable[[type], bool]) -> list[object]:
    # There are millions of them: only their classes are looked at one by one.
    try:
        kinds = {id(kind) for kind in set(map(type, values)) if is_wanted(kind)}
    except TypeError:
        # Some classes cannot be hashed.
        by_identity = dict(zip(map(id, map(type, values)), map(type, values), strict=True))
        kinds = {known for known, kind in by_identity.items() if is_wanted(kind)}
    return [value for value in values if id(type(value)) in kinds] if kinds else []


def _referents(holders: list[object]) -> Iterator[list[object]]:
    # Piece by piece: there are many times as many of them.
    for start in range(0, len(holders), 10_000):
        yield gc.get_referents(*holders[start : start + 10_000])


def _local_values() -> list[object]:
    # The collector does not list the variables of functions that run now.
    values: list[object] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        values += frame.f_locals.values()
        frame = frame.f_back
    return values


def holders(loader: object, generators: Mapping[str, object]) -> dict[str, object]:
    """Return what a loader holds that may have a state, by name: its sampler, its data, its generators."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = {"sampler": sampler, "dataset": getattr(loader, "dataset", None), **generators}
    return {name: holder for name, holder in found.items() if holder is not None}


@contextmanager
def unmoved(generators: Sequence[object]) -> Iterator[None]:
    """Leave generators in the state that they have now, whatever happens to them inside."""
    states = [generator_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)


def attributes_of(value: Any) -> Iterator[tuple[str, Step, Any]]:
    """Yield the attributes of an object, or of a class, without methods and what belongs to Python."""
    instance = getattr(value, "__dict__", {})
    for name, item in list(instance.items()) if isinstance(instance, Mapping) else ():
        is_of_python = name.startswith("__") and name.endswith("__")
        if not (isinstance(value, type) and (is_of_python or _is_of_class(item))):
            yield f".{name}", Step("attribute", name), item
    if isinstance(value, type):
        return
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                yield f".{name}", Step("attribute", name), getattr(value, name)


def _is_of_class(item: object) -> bool:
    return isinstance(
        item,
        types.FunctionType
        | property
        | classmethod
        | staticmethod
        | types.MemberDescriptorType
        | types.GetSetDescriptorType,
    )


def _put_local(frame: types.FrameType, name: str, value: object) -> None:
    # Kept: to ask for the mapping again is, before Python 3.13, to fill it from the frame again.
    variables = frame.f_locals
    variables[name] = value
    if sys.version_info < (3, 13):
        # There the mapping is a copy of the variables, and this writes it back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
