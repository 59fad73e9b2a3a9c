"""What a value on a module looked like, to tell later whether it has changed. Nothing is kept alive by it."""

from __future__ import annotations

import argparse
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

SCALARS = frozenset({bool, int, float, complex, str, type(None)})
# So much of a value is looked at; of what is larger, only whether it is the same one and of the same size.
_MOST_PLACES = 1000
_MOST_BYTES = 1 << 20
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# Their objects change for reasons of their own, or are looked at elsewhere.
_LIBRARIES = frozenset({"torch", "unbroken"})

IsKnown = Callable[[object], bool]


class Sight:
    """A value as it is now: numbers and texts in it, versions of its tensors, attributes of its objects.

    What `is_known` of the objects inside is kept elsewhere, and is not looked at.
    """

    __slots__ = ("_marks", "_tensors")

    def __init__(self, value: object, is_known: IsKnown) -> None:
        self._marks: list[object] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        todo: deque[object] = deque([value])
        seen: set[int] = set()
        while todo and len(self._marks) < _MOST_PLACES:
            item = todo.popleft()
            if type(item) in SCALARS:
                self._marks.append(item if isinstance(item, str) else repr(item))
            elif id(item) in seen or is_known(item):
                self._marks.append(None)
            else:
                seen.add(id(item))
                self._look(item, todo)
        self._marks += [id(item) for item in todo]

    def is_as(self, other: Sight) -> bool:
        """Tell whether `other`, taken earlier, shows the same."""
        is_alive = all(tensor() is not None for tensor in other._tensors)
        return is_alive and self._marks == other._marks

    def _look(self, item: Any, todo: deque[object]) -> None:
        if isinstance(item, torch.Tensor):
            self._tensors.append(weakref.ref(item))
            self._marks.append((id(item), version(item), item.shape))
        elif has_shape(item):
            is_small = item.nbytes <= _MOST_BYTES and not item.dtype.hasobject
            self._marks.append((item.shape, hash(item.tobytes()) if is_small else id(item)))
        elif isinstance(item, bytes | bytearray):
            self._marks.append((len(item), hash(bytes(item[:_MOST_BYTES]))))
        elif (inner := _inner(item)) is not None:
            self._marks.append((type(item), len(inner)))
            if len(inner) > _MOST_PLACES:
                self._marks.append(id(item))
            if len(todo) < _MOST_PLACES:
                todo.extend(_first(inner))
        else:
            self._marks.append(id(item))


def has_state(value: object) -> bool:
    """Tell whether `value` holds something that training may change, and that is looked at."""
    return isinstance(value, bytearray) or has_shape(value) or _inner(value) is not None


def version(tensor: torch.Tensor) -> int | None:
    """Return the count of changes in place, which tensors made for inference lack."""
    return None if tensor.is_inference() else tensor._version


def has_shape(value: object) -> bool:
    """Tell whether `value` is an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _inner(value: Any) -> Any:
    """Return what a container or an object of an ordinary class consists of; None for anything else."""
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        return value
    if isinstance(value, type | nn.Module):
        return None
    root = type(value).__module__.partition(".")[0]
    is_of_library = root in _LIBRARIES or root in sys.stdlib_module_names
    if is_of_library and not isinstance(value, _NAMESPACES):
        return None
    slots = {
        name: getattr(value, name)
        for base in type(value).__mro__
        for name, item in vars(base).items()
        if isinstance(item, types.MemberDescriptorType) and hasattr(value, name)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _first(inner: Any) -> Iterator[object]:
    for _, item in zip(range(_MOST_PLACES), inner, strict=False):
        yield item
        if isinstance(inner, dict):
            yield inner[item]
