"""Plain attributes of modules: one that changes while training runs is state, the others are settings.

Nothing on a module tells a counter from a setting but that it moves. So the attributes of each module are
noted when it is first seen. What is plain and differs later is kept from then on, the rest is told.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from unbroken.frameworks.torch.module_names import dotted
from unbroken.frameworks.torch.sights import SCALARS, IsKnown, Sight, has_state, version

Modules: TypeAlias = Iterable[tuple[str, nn.Module]]

# Larger ones are data rather than counters, and would have to be compared item by item at each save.
_MOST_ITEMS = 100
_DEEPEST = 5
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_CONTAINERS = frozenset({list, tuple, set, frozenset, deque, torch.Size}) | _MAPPINGS
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _SeenTensor:
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
    sights: dict[str, Sight]
    tensors: dict[str, _SeenTensor]
    counters: set[str] = field(default_factory=set)


class Counters:
    """The attributes of modules that have changed since these modules were first seen.

    `is_known` tells of objects whose state is kept elsewhere, as that of other parts.
    """

    def __init__(self, is_known: IsKnown) -> None:
        self._is_known = is_known
        self._baselines: dict[int, _Baseline] = {}

    def state(self, modules: Modules, is_kept: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
        """Return `module -> attribute -> value` for what changes; `is_kept` tells it of buffers."""
        modules, found = list(modules), {}
        is_known = self._known(modules)
        for name, module in modules:
            baseline = self._baselines.get(id(module))
            if baseline is None or baseline.module() is not module:
                self._baselines[id(module)] = _baseline(module, is_known)
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
        modules = list(modules)
        is_known = self._known(modules)
        for name, module in modules:
            attributes = saved.get(name, {})
            for attribute, value in attributes.items():
                _put(vars(module), attribute, value)
            self._baselines[id(module)] = _baseline(module, is_known)
            self._baselines[id(module)].counters |= set(attributes)

    def unkept(self, modules: Modules, is_kept: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Return `(name, what it is)` for what has changed and is in no state."""
        modules = list(modules)
        self.state(modules, is_kept)
        is_known, found = self._known(modules), []
        for name, module in modules:
            baseline = self._baselines[id(module)]
            changes = (*_unkept(name, module, baseline, is_kept), *_unlike(module, baseline, is_known))
            found += [(dotted(name, attribute), text) for attribute, text in changes]
        return found

    def _known(self, modules: Sequence[tuple[str, nn.Module]]) -> IsKnown:
        """Return what tells of the tensors of `modules`, too, which some modules also hold in lists."""
        tensors: set[int] = set()

        def is_known(value: object) -> bool:
            if not tensors:
                # Worked out when it is asked for: nearly all saves do not.
                owners = (module for _, module in modules)
                tensors.update(
                    id(item)
                    for module in owners
                    for item in (*module._parameters.values(), *module._buffers.values())
                )
            return id(value) in tensors or self._is_known(value)

        return is_known


def _baseline(module: nn.Module, is_known: IsKnown) -> _Baseline:
    found = dict(_attributes(module))
    plain = {attribute: copy.deepcopy(value) for attribute, value in found.items() if _is_plain(value)}
    return _Baseline(
        module=weakref.ref(module),
        count=len(vars(module)),
        values=plain,
        others=found.keys() - plain.keys(),
        sights={
            name: Sight(value, is_known)
            for name, value in found.items()
            if name not in plain and not isinstance(value, torch.Tensor) and has_state(value)
        },
        tensors={attribute: _seen(tensor) for attribute, tensor in _loose_tensors(module)},
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _OF_TORCH)


def _is_plain(value: Any) -> bool:
    """Tell whether `value` is a number or a text, or made of at most so many of them."""
    return _is_scalar(value) or _room_left(value, _MOST_ITEMS, _DEEPEST) >= 0


def _room_left(value: Any, room: int, depth: int) -> int:
    """Return for how many items more there is room beside those in `value`; below 0 if it is not plain."""
    kind = type(value)
    if kind not in _CONTAINERS or len(value) > room or not depth:
        return -1
    room -= len(value)
    items: Iterable[Any] = value
    if kind in _MAPPINGS:
        if not all(map(_is_scalar, value)):
            return -1
        items = value.values()
    for item in items:
        if not _is_scalar(item):
            room = _room_left(item, room, depth - 1)
            if room < 0:
                break
    return room


def _is_scalar(value: object) -> bool:
    if type(value) in SCALARS:
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
        if seen is not None and seen.tensor() is tensor and seen.version == version(tensor):
            continue
        if attribute not in module._buffers or not is_kept(dotted(name, attribute)):
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


def _unlike(module: nn.Module, baseline: _Baseline, is_known: IsKnown) -> Iterator[tuple[str, str]]:
    """Yield what is no plain attribute, or none any more, and does not look as it did."""
    for attribute, value in _attributes(module):
        if isinstance(value, torch.Tensor) or _is_plain(value) or not has_state(value):
            continue
        seen = baseline.sights.get(attribute)
        if seen is None or not Sight(value, is_known).is_as(seen):
            size = f" of {len(value)} items" if type(value) in _CONTAINERS else ""
            yield attribute, f"a {type(value).__name__}{size}"


def _seen(tensor: torch.Tensor) -> _SeenTensor:
    return _SeenTensor(weakref.ref(tensor), version(tensor), tensor.shape)


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    attributes[name] = _filled(attributes.get(name), value)


def _filled(live: Any, value: Any) -> Any:
    """Return `value`, in the container that is there if it is of its kind, since others may hold it."""
    if type(live) is not type(value) or (isinstance(live, deque) and live.maxlen != value.maxlen):
        return value
    if isinstance(live, list | deque):
        room = len(value) - len(live)
        items = [_filled(old, new) for old, new in zip([*live, *[None] * room], value, strict=False)]
        live.clear()
        live.extend(items)
    elif isinstance(live, dict):
        filled = {key: _filled(live.get(key), item) for key, item in value.items()}
        live.clear()
        live.update(filled)
    elif isinstance(live, set):
        live.clear()
        live.update(value)
    else:
        return value
    return live
