"""What an optimizer keeps for each parameter, found by having one like it step on a single element."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unbroken.frameworks.torch.optimizer_state import is_of_torch
from unbroken.frameworks.torch.param_groups import FLAVOURS
from unbroken.state.tensors import TensorSource

# They ask for a function that computes the loss, and do with it what they like.
_WITH_CLOSURES = (torch.optim.LBFGS,)
# What options that nobody can train with make of a step.
_REFUSED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def moments_of(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]] | None:
    """Return what `optimizer` would keep, by name, for each parameter of each group, with these `options`.

    The optimizer itself is left alone: what steps is another one of its class, on parameters with one element
    and as many dimensions. None if that cannot be known, as for a class that is not of torch.
    """
    if not is_of_torch(optimizer) or isinstance(optimizer, _WITH_CLOSURES):
        return None
    groups = _small_groups(optimizer, options)
    try:
        other = _made(optimizer, groups, {})
        # The step itself: no hooks of it, and none of the process, are called.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(other)
    except _REFUSED:
        return None
    return [[kept(other.state.get(parameter, {})) for parameter in group["params"]] for group in groups]


def refusal(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    entries: Sequence[Sequence[Mapping[str, Any]]],
) -> str | None:
    """Return why the class of `optimizer` does not take `options` and `entries` by group, None if it does.

    Again it is another one that is asked, with tensors of one element in place of those of `entries`.
    """
    groups = _small_groups(optimizer, options)
    state = {
        parameter: {key: _small_like(item) for key, item in of_one.items()}
        for group, of_group in zip(groups, entries, strict=True)
        for parameter, of_one in zip(group["params"], of_group, strict=True)
        if of_one
    }
    try:
        _made(optimizer, groups, state)
    except _REFUSED as error:
        return f"{type(error).__name__}: {error}"
    return None


def kept(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept for a parameter: without momentum there is None in its place, or nothing."""
    return {key: item for key, item in entries.items() if item is not None}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that say what is kept; a rate may be a tensor in a file."""
    return {key: item for key, item in options.items() if key not in FLAVOURS | {"lr", "initial_lr"}}


def _small_groups(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of `optimizer` with small parameters, and the options of a file."""
    groups = [
        {**group, **_plain(of_group), **dict.fromkeys(FLAVOURS & group.keys(), False)}
        for group, of_group in zip(optimizer.param_groups, options, strict=True)
    ]
    for group in groups:
        group["params"] = [_small(parameter, optimizer) for parameter in group["params"]]
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"] = float(group["lr"])
    return groups


def _made(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Any:
    """Return another optimizer of the same class, made as unpickling makes one."""
    other: Any = type(optimizer).__new__(type(optimizer))
    # What a class of the user's may look at besides.
    vars(other).update(vars(optimizer))
    kept_by_all = {"defaults": dict(optimizer.defaults), "state": defaultdict(dict, state)}
    other.__setstate__({**kept_by_all, "param_groups": groups})
    return other


def _small_like(item: Any) -> Any:
    return torch.zeros([1] * len(item.shape)) if isinstance(item, TensorSource | torch.Tensor) else item


def _small(parameter: torch.Tensor, optimizer: object) -> torch.nn.Parameter:
    shape = [1] * parameter.dim()
    small = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device="cpu"))
    gradient = torch.zeros_like(small, requires_grad=False)
    small.grad = gradient.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else gradient
    return small
