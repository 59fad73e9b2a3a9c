"""Modules: parameters, persistent buffers, extra state and flags, under names that no wrapper changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unbroken.frameworks.torch.tensors import tensor_differences
from unbroken.state.choices import Choices
from unbroken.state.handlers import ORDER_MODULE, Difference

# Attributes in which wrappers keep the user's module.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# No parameter or buffer can have this name.
_FLAGS = "(flags)"


class ModuleHandler:
    """`torch.nn.Module`, restored in place: its state_dict, what is frozen, what is in evaluation mode."""

    name = "torch.module"
    order = ORDER_MODULE

    def __init__(self, parts: Mapping[str, object] | None = None, choices: Choices | None = None) -> None:
        self._parts = parts or {}
        self._choices = choices or Choices()

    def accepts(self, value: object) -> bool:
        return isinstance(value, nn.Module)

    def state(self, value: Any) -> object:
        module = unwrap(value)
        flags = {
            "frozen": [name for name, parameter in _parameters(module) if not parameter.requires_grad],
            "evaluating": [name for name, inner in _modules(module) if not inner.training],
        }
        # Not detached: what is frozen shows only on the parameters themselves.
        tensors = {canonical_name(name): item for name, item in module.state_dict(keep_vars=True).items()}
        return {**tensors, _FLAGS: flags}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live: Any = self.state(value)
        found = [Difference("missing", name, "the checkpoint lacks it") for name in live if name not in state]
        found += [Difference("unexpected", name, "the model lacks it") for name in state if name not in live]
        for name, item in live.items():
            if name in state and isinstance(item, torch.Tensor):
                found += tensor_differences(name, item, state[name])
        return found

    def restore(self, value: Any, state: Any) -> None:
        module = unwrap(value)
        filled = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        filled |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        loaded = {name: state[canonical_name(name)] for name in module.state_dict()}
        # Extra state may be kept as it is given, and tensors in it lie in the bytes that were read.
        module.load_state_dict(
            {name: item if name in filled else copy.deepcopy(item) for name, item in loaded.items()}
        )
        frozen, evaluating = set(state[_FLAGS]["frozen"]), set(state[_FLAGS]["evaluating"])
        for name, parameter in _parameters(module):
            parameter.requires_grad_(name not in frozen)
        for name, inner in _modules(module):
            inner.training = name not in evaluating


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
    """Return `id(tensor) -> name` for the parameters of all modules among `parts` and the tensors in them."""
    names: dict[int, str] = {}
    for part, value in parts.items():
        for name, parameter in _tensors(value):
            names.setdefault(id(parameter), f"{part}.{name}" if name else part)
    return names


def _tensors(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, nn.Module):
        yield from _parameters(unwrap(value))
    elif isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((str(key), item) for key, item in items if isinstance(item, torch.Tensor))


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        yield canonical_name(name), parameter


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules():
        yield canonical_name(name), inner
