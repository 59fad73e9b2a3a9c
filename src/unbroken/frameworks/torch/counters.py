"""Plain attributes of modules: one that changes while training runs is state, the others are settings.

Nothing on a module tells a counter from a setting but that it moves. So the plain attributes of each
module are noted when it is first seen, and what differs later is kept from then on.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

Modules: TypeAlias = Iterable[tuple[str, nn.Module]]

# Larger ones are data rather than counters, and would have to be compared item by item at each save.
_MOST_ITEMS = 100
_SCALARS = frozenset({bool, int, float, complex, str, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_CONTAINERS = frozenset({list, tuple, set, frozenset, deque, torch.Size}) | _MAPPINGS
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Sight:
    """A tensor as it was seen: a change shows in the object, its version or its shape."""

    tensor: weakref.ref[torch.Tensor]
    version: int | None
    shape: torch.Size


@dataclass(slots=True, kw_only=True)
class _Baseline:
    """The attributes of one module as they were, and those that have been found to change."""

    module: weakref.ref[nn.Module]
    count: int
    values: dict[str, object]
    others: set[str]
    containers: dict[str, tuple[int, int]]
    tensors: dict[str, _Sight]
    counters: set[str] = field(default_factory=set)


class Counters:
    """The plain attributes of modules that have changed since these modules were first seen."""

    def __init__(self) -> None:
        self._baselines: dict[int, _Baseline] = {}

    def state(self, modules: Modules, is_kept: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
        """Return `module -> attribute -> value` for what changes; `is_kept` tells it of buffers."""
        found = {}
        for name, module in modules:
            baseline = self._baselines.get(id(module))
            if baseline is None or baseline.module() is not module:
                self._baselines[id(module)] = _baseline(module)
                continue
            changed = _changed(module, baseline)
            if not changed <= baseline.counters and not _cached(name, module, baseline, is_kept):
                baseline.counters |= changed
            if not baseline.counters:
                continue
            attributes = vars(module)
            kept = {
                attribute: attributes[attribute]
                for attribute in sorted(baseline.counters)
                if _is_plain(attributes.get(attribute, _ABSENT))
            }
            if kept:
                found[name] = kept
        return found

    def restore(self, modules: Modules, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes of `saved`; the others are settings as they are now."""
        for name, module in modules:
            attributes = saved.get(name, {})
            for attribute, value in attributes.items():
                _put(vars(module), attribute, value)
            self._baselines[id(module)] = _baseline(module)
            self._baselines[id(module)].counters |= set(attributes)

    def unkept(self, modules: Modules, is_kept: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Return `(name, what it is)` for what has changed and is in no state."""
        modules = list(modules)
        self.state(modules, is_kept)
        return [
            (join(name, attribute), text)
            for name, module in modules
            for attribute, text in _unkept(name, module, self._baselines[id(module)], is_kept)
        ]


def join(module: str, name: str) -> str:
    """Return the full name of what is called `name` on a module."""
    return f"{module}.{name}" if module and name else module or name


def _baseline(module: nn.Module) -> _Baseline:
    found = dict(_attributes(module))
    plain = {attribute: copy.copy(value) for attribute, value in found.items() if _is_plain(value)}
    return _Baseline(
        module=weakref.ref(module),
        count=len(vars(module)),
        values=plain,
        others=found.keys() - plain.keys(),
        containers={
            name: (id(value), len(value)) for name, value in found.items() if type(value) in _CONTAINERS
        },
        tensors={attribute: _sight(tensor) for attribute, tensor in _loose_tensors(module)},
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _OF_TORCH)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in _CONTAINERS:
        if len(value) > _MOST_ITEMS:
            return False
        if kind in _MAPPINGS and not all(_is_scalar(item) for item in value.values()):
            return False
        return all(_is_scalar(item) for item in value)
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    if type(value) in _SCALARS:
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.number | numpy.bool_)


def _changed(module: nn.Module, baseline: _Baseline) -> set[str]:
    """Return the plain attributes that differ from the baseline or are new."""
    attributes, found = vars(module), set()
    # Run at each save for every attribute of every module: nearly all are found unchanged at once.
    for attribute, before in baseline.values.items():
        value = attributes.get(attribute, _ABSENT)
        if value is before or (type(value) is type(before) and value == before):
            continue
        if _is_plain(value):
            found.add(attribute)
    others: Iterable[str] = baseline.others
    if len(attributes) != baseline.count:
        others = attributes.keys() - baseline.values.keys() - _OF_TORCH
    return found | {name for name in others if _is_plain(attributes.get(name, _ABSENT))}


def _loose_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module that its state_dict leaves out."""
    for attribute, value in _attributes(module):
        if isinstance(value, torch.Tensor):
            yield attribute, value
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield name, buffer


def _changed_tensors(
    name: str, module: nn.Module, baseline: _Baseline, is_kept: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, tensor in _loose_tensors(module):
        seen = baseline.tensors.get(attribute)
        if seen is not None and seen.tensor() is tensor and seen.version == _version(tensor):
            continue
        if attribute not in module._buffers or not is_kept(join(name, attribute)):
            yield attribute, tensor


def _cached(name: str, module: nn.Module, baseline: _Baseline, is_kept: Callable[[str], bool]) -> list[str]:
    """Return the tensors of a module that were made, or made anew in another shape, and are not kept.

    Plain values beside such a cache say what it holds, as its length. Restored without it they would
    be wrong, where a module without both makes both again.
    """
    return [
        attribute
        for attribute, tensor in _changed_tensors(name, module, baseline, is_kept)
        if not tensor.requires_grad
        and (attribute not in baseline.tensors or baseline.tensors[attribute].shape != tensor.shape)
    ]


def _unkept(
    name: str, module: nn.Module, baseline: _Baseline, is_kept: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    cached = _cached(name, module, baseline, is_kept)
    for attribute, _ in _changed_tensors(name, module, baseline, is_kept):
        full = "a non-persistent buffer" if attribute in module._buffers else "a tensor in a plain attribute"
        yield attribute, full
    for attribute in sorted(_changed(module, baseline) - baseline.counters):
        yield attribute, f"a plain attribute beside {', '.join(cached)}"
    for attribute, value in _attributes(module):
        if type(value) not in _CONTAINERS or _is_plain(value):
            continue
        if attribute in baseline.values or _grew(baseline.containers.get(attribute), value):
            yield attribute, f"a {type(value).__name__} of {len(value)} items"


def _grew(before: tuple[int, int] | None, value: Any) -> bool:
    return before != (id(value), len(value))


def _sight(tensor: torch.Tensor) -> _Sight:
    return _Sight(weakref.ref(tensor), _version(tensor), tensor.shape)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; a container that is there is filled, since others may hold it."""
    live: Any = attributes.get(name)
    if type(live) is not type(value) or (isinstance(live, deque) and live.maxlen != value.maxlen):
        attributes[name] = value
    elif isinstance(live, list | deque):
        live.clear()
        live.extend(value)
    elif isinstance(live, dict | set):
        live.clear()
        live.update(value)
    else:
        attributes[name] = value
