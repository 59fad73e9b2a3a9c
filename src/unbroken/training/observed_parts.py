"""What an observed script trains with: its modules, optimizers and schedulers, found by their names."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.discovery import discover, script_modules, script_roots
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.python import StateDictHandler
from unbroken.training import families
from unbroken.training.part import Part
from unbroken.training.randomness import RNG_PART, GlobalRandomness, GlobalRandomnessHandler
from unbroken.training.rehearsal_components import Component
from unbroken.training.rehearsal_objects import FOUND, Taken, take_parts

# Which parameters have a gradient depends, between two steps, on where the script clears them.
_GRADED = ("/(flags)/graded", "/(flags)/graded_sparse")


class NoLoaders:
    """An observed script has no loaders of ours, which would hold generators."""

    def generators(self) -> list[object]:
        return []


def observed_parts(optimizers: Iterable[Any]) -> tuple[list[Part], list[str]]:
    """Return the parts of the script that runs now, generators last, and notes on what cannot be one.

    `optimizers` are those that were made; they are parts even if no name leads to them.
    """
    objects = _short(_without_inner(_named_objects()))
    objects |= _unnamed(objects, optimizers)
    objects |= _loose_parameters(objects)
    handlers = families.handlers(objects, Choices(non_persistent=("*",) if _hide_buffers(objects) else ()))
    parts, notes = [], []
    for name, value in objects.items():
        part = _part(name, value, handlers)
        if isinstance(part, Part):
            parts.append(part)
        else:
            notes.append(part)
    return [*parts, Part(RNG_PART, GlobalRandomness(objects), GlobalRandomnessHandler())], notes


def take(parts: Sequence[Part]) -> list[Taken]:
    """Return the states of `parts` between two steps."""
    taken = []
    for one in take_parts(parts, inside_step=False):
        kept = [component for component in one.components if not _is_of_step(component)]
        taken.append(Taken(one.name, one.state, one.sources, kept))
    return taken


def _is_of_step(component: Component) -> bool:
    # Without any flag there is one component for all of them, which then comes and goes.
    is_empty = component.name.endswith("/(flags)") and not component.state
    return is_empty or component.name.endswith(_GRADED)


def _named_objects() -> dict[str, Any]:
    live = script_roots(script_modules())
    found = [one for one in discover(live, frozenset()).found if one.kind == "stateful"]
    objects = {one.name: one.place.look(live) for one in found}
    return {name: value for name, value in objects.items() if _trains(value)}


def _hide_buffers(objects: Mapping[str, Any]) -> bool:
    """Tell whether a module has buffers that its state_dict leaves out: they are looked at, too."""
    torch: Any = sys.modules["torch"]
    modules = (value for value in objects.values() if isinstance(value, torch.nn.Module))
    return any(inner._non_persistent_buffers_set for module in modules for inner in module.modules())


def _trains(value: object) -> bool:
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.nn.Module):
        # What computes a loss is a module, too, and has no state.
        return bool(next(value.parameters(), None) is not None or next(value.buffers(), None) is not None)
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return isinstance(value, kinds)


def _without_inner(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out modules inside other ones."""
    torch: Any = sys.modules["torch"]
    inner = {
        id(module)
        for value in objects.values()
        if isinstance(value, torch.nn.Module)
        for module in value.modules()
        if module is not value
    }
    return {name: value for name, value in objects.items() if id(value) not in inner}


def _short(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Call objects by their last name, where that is enough to tell them apart."""
    count = Counter(_last(name) for name in objects)
    taken = (RNG_PART, FOUND)
    return {
        _last(name) if count[_last(name)] == 1 and _last(name) not in taken else name: value
        for name, value in objects.items()
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _unnamed(objects: Mapping[str, Any], optimizers: Iterable[Any]) -> dict[str, Any]:
    known = {id(value) for value in objects.values()}
    rest = [optimizer for optimizer in optimizers if id(optimizer) not in known]
    return {f"(optimizer {number})": optimizer for number, optimizer in enumerate(rest, 1)}


def _loose_parameters(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each optimizer its parameters that are in no module that was found."""
    torch: Any = sys.modules["torch"]
    held = {
        id(parameter)
        for value in objects.values()
        if isinstance(value, torch.nn.Module)
        for parameter in value.parameters()
    }
    loose = {}
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            own = {where: one for where, one in _parameters(value) if id(one) not in held}
            held |= {id(one) for one in own.values()}
            if own:
                loose[f"{name} parameters"] = own
    return loose


def _parameters(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{group_index}.{index}", parameter


def _part(name: str, value: object, handlers: Iterable[StateHandler]) -> Part | str:
    """Return the part of that name, or why there is none."""
    reason = ""
    able = [handler for handler in handlers if handler.accepts(value)]
    # What our own handler would not keep exactly can still be looked at.
    for handler in (*able[:1], StateDictHandler()):
        part = Part(name, value, handler)
        try:
            take([part])
        except UnsupportedStateError as error:
            reason = reason or error.message
        else:
            return part
    return f"not looked at: {name}: {reason}"
