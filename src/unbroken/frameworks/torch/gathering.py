"""The gradients that training gathers: whether some were added since a moment, and letting go of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

_Mark = dict[int, tuple["weakref.ref[torch.Tensor]", int]]


def mark_gradients(values: Iterable[object]) -> Callable[[], bool]:
    """Return a function that tells whether gradients of the modules among `values` have changed since now.

    By version counters, so that nothing is copied. Gradients that were dropped do not count.
    """
    modules = [value for value in values if isinstance(value, nn.Module)]
    then = _mark(modules)

    def have_changed() -> bool:
        for place, (gradient, version) in _mark(modules).items():
            # Held weakly, for memory; by the object, since another one may get its address.
            known, known_version = then.get(place, (None, -1))
            if known is None or known() is not gradient() or known_version != version:
                return True
        return False

    return have_changed


def drop_gradients(values: Iterable[object]) -> None:
    """Let go of the gradients of modules, and of all that optimizers train."""
    for value in values:
        if isinstance(value, nn.Module):
            value.zero_grad(set_to_none=True)
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def _mark(modules: Iterable[nn.Module]) -> _Mark:
    return {
        id(parameter): (weakref.ref(parameter.grad), parameter.grad._version)
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    }
