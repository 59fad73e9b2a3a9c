"""Modules: parameters, persistent buffers, extra state, under names that no wrapper changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unbroken.frameworks.torch.tensors import tensor_differences
from unbroken.state.handlers import ORDER_MODULE

# Attributes in which wrappers keep the user's module.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ModuleHandler:
    """`torch.nn.Module`, restored in place."""

    name = "torch.module"
    order = ORDER_MODULE

    def accepts(self, value: object) -> bool:
        return isinstance(value, nn.Module)

    def state(self, value: Any) -> object:
        return {canonical_name(name): item for name, item in unwrap(value).state_dict().items()}

    def differences(self, value: Any, state: Any) -> list[str]:
        live: Any = self.state(value)
        found = [f"{name}: the checkpoint lacks it" for name in live if name not in state]
        found += [f"{name}: the model lacks it" for name in state if name not in live]
        for name, item in live.items():
            if name in state and isinstance(item, torch.Tensor):
                found += tensor_differences(name, item, state[name])
        return found

    def restore(self, value: Any, state: Any) -> None:
        module = unwrap(value)
        module.load_state_dict({name: state[canonical_name(name)] for name in module.state_dict()})


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside torch.compile and data-parallel wrappers."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = module.module if isinstance(module, parallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def canonical_name(name: str) -> str:
    """Return a parameter's name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def parameter_names(parts: Mapping[str, object]) -> dict[int, str]:
    """Return `id(parameter) -> part.name` for the parameters of all modules among `parts`."""
    names: dict[int, str] = {}
    for part, value in parts.items():
        for name, parameter in _parameters(value):
            names.setdefault(id(parameter), f"{part}.{name}")
    return names


def _parameters(value: object) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(value, nn.Module):
        for name, parameter in unwrap(value).named_parameters():
            yield canonical_name(name), parameter
