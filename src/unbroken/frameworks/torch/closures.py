"""Code on a copy of a module that computes with the module it was copied from.

A copy takes over what functions stand on a module as they are: one that closes over the module, or names it
as a global, goes on with the weights of that one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from unbroken.frameworks.torch.module_names import dotted

# Nothing of a module is looked for in these; a frame and a weak table hold what others put there.
_LEAVES = (type, ModuleType, CodeType, FrameType, torch.Tensor, str, bytes, int, float)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def place_held(copied: nn.Module, original: nn.Module) -> str | None:
    """Return the place on `copied`, such as "encoder.forward", from which `original` is reached, or None."""
    own = _Own(original)
    seen = {id(module) for module in copied.modules()} - own.ids
    for name, module in copied.named_modules():
        for attribute, value in vars(module).items():
            if any(own.has(item) for item in _reached(value, seen)):
                return dotted(name, attribute)
    return None


class _Own:
    """What belongs to a module: the modules in it, and the memory of its weights."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self.ids = {*map(id, module.modules()), *map(id, tensors)}
        self._memory = {_memory(tensor) for tensor in tensors} - {0}

    def has(self, item: object) -> bool:
        return id(item) in self.ids or (isinstance(item, torch.Tensor) and _memory(item) in self._memory)


def _memory(tensor: torch.Tensor) -> int:
    """Return where the memory begins that `tensor` is a view of, or 0 if it has none."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _reached(value: object, seen: set[int]) -> Iterator[object]:
    """Yield `value` and what is reached from it."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if not isinstance(item, (*_LEAVES, *_WEAK)):
            waiting += _referents(item)


def _referents(item: Any) -> list[Any]:
    if isinstance(item, weakref.ref):
        return [item()]
    if isinstance(item, FunctionType):
        # All globals of its file are too many: those that it names, and of these no more than weights.
        named = (item.__globals__.get(name) for name in _names(item.__code__))
        found = [one for one in named if isinstance(one, nn.Module | torch.Tensor)]
        return [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__, *found]
    return gc.get_referents(item)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
