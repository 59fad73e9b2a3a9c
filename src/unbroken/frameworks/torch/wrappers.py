"""Where a module stands in a tree of modules, under a name that no wrapper around it or inside changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from unbroken.frameworks.torch.module_names import dotted

# Attributes in which wrappers keep the user's module, and the classes that keep it in `module`: any class
# may call its child so, hence these go by their names.
WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PARALLEL = "module"
_PARALLEL_CLASSES = frozenset({"DataParallel", "DistributedDataParallel", "DeepSpeedEngine"})


class Place(NamedTuple):
    """A module inside another: `key` is what torch calls it, `name` what it is without its wrappers."""

    name: str
    key: str
    module: nn.Module
    is_wrapper: bool


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside torch.compile and data-parallel wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def places_of(module: nn.Module) -> list[Place]:
    """Return every place of a module in the tree below `module`, outer ones first."""
    found: list[Place] = []
    while (inner := _wrapped(module)) is not None:
        found.append(Place("", "", module, True))
        module = inner
    _walk(module, "", "", found)
    return found


def names_by_key(value: object) -> dict[str, str]:
    """Return `key -> name` for the modules in a module; nothing for any other object.

    Unlike the keys in a state_dict those here begin with what wraps the module itself.
    """
    if not isinstance(value, nn.Module):
        return {}
    around = ""
    while (inner := _wrapped(value)) is not None:
        segment = next(segment for segment, child in value._modules.items() if child is inner)
        around, value = dotted(around, segment), inner
    return {dotted(around, place.key): place.name for place in places_of(value)}


def canonical(key: str, names: Mapping[str, str]) -> str:
    """Return an entry of a state_dict without what wrappers add; `names` are those of modules by key."""
    place, _, leaf = key.rpartition(".")
    if place in names and leaf not in WRAPPED_AS:
        return dotted(names[place], leaf)
    inside = [leaf]
    while place not in names:
        place, _, segment = place.rpartition(".")
        inside.append(segment)
    below = ".".join(segment for segment in reversed(inside) if segment not in WRAPPED_AS)
    return dotted(names[place], below)


def _walk(module: nn.Module, name: str, key: str, found: list[Place]) -> None:
    wrapped = _wrapped(module)
    found.append(Place(name, key, module, wrapped is not None))
    for segment, child in module._modules.items():
        if child is not None:
            _walk(child, name if child is wrapped else dotted(name, segment), dotted(key, segment), found)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that `module` wraps, if it is a wrapper."""
    children = module._modules
    for attribute in WRAPPED_AS:
        if attribute in children:
            return children[attribute]
    if PARALLEL in children and any(cls.__name__ in _PARALLEL_CLASSES for cls in type(module).__mro__):
        return children[PARALLEL]
    return None
