"""Gradients: which parameters have one is always kept, their values only inside a step.

Between two steps a gradient is about to be set to zero or to None, and which of both it is matters: with
zeros an optimizer moves the parameter by weight decay and momentum, with None it leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from unbroken.state.handlers import Difference

Parameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]


def graded(parameters: Parameters) -> dict[str, Any]:
    """Return flags that say which parameters have a gradient; none where no parameter has one."""
    dense, sparse = [], {}
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo:
            sparse[name] = gradient.sparse_dim()
        else:
            dense.append(name)
    flags: dict[str, Any] = {"graded": sorted(dense)} if dense else {}
    return {**flags, "graded_sparse": sparse} if sparse else flags


def gradients(parameters: Parameters) -> dict[str, Any]:
    """Return the gradients by the names of their parameters: live tensors, sparse ones in their parts."""
    return {name: _taken(parameter.grad) for name, parameter in parameters if parameter.grad is not None}


def restore_gradients(parameters: Parameters, flags: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Give each parameter its gradient of `saved`, or else one of zeros if it had one, or none."""
    dense, sparse = set(flags.get("graded", ())), flags.get("graded_sparse", {})
    for name, parameter in parameters:
        if name in saved and _shape(saved[name]) == tuple(parameter.shape):
            parameter.grad = _put(saved[name], parameter)
        elif name in dense:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        elif name in sparse:
            parameter.grad = _empty(parameter, sparse[name])
        else:
            parameter.grad = None


def gradient_differences(parameters: Parameters, saved: Mapping[str, Any]) -> list[Difference]:
    """Return which gradients have another shape than their parameter; unknown names are told elsewhere."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    return [
        Difference(
            "shape",
            name,
            f"a gradient of shape {shapes[name]}, the checkpoint has one of {_shape(gradient)}",
        )
        for name, gradient in saved.items()
        if name in shapes and shapes[name] != _shape(gradient)
    ]


def _shape(gradient: Any) -> tuple[int, ...]:
    return tuple(gradient["shape"] if isinstance(gradient, Mapping) else gradient.shape)


def _taken(gradient: torch.Tensor) -> Any:
    if gradient.layout is not torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(),
        "values": gradient._values(),
        "shape": list(gradient.shape),
        "is_coalesced": gradient.is_coalesced(),
    }


def _put(saved: Any, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(saved, Mapping):
        values = saved["values"].to(device=parameter.device, dtype=parameter.dtype)
        indices = saved["indices"].to(device=parameter.device)
        return torch.sparse_coo_tensor(
            indices, values, saved["shape"], is_coalesced=saved["is_coalesced"], check_invariants=False
        )
    gradient: torch.Tensor = saved.to(device=parameter.device, dtype=parameter.dtype)
    if parameter.is_contiguous():
        return gradient
    # Laid out as the parameter, as backward makes it: sums over another layout have other bits.
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _empty(parameter: nn.Parameter, sparse_dim: int) -> torch.Tensor:
    shape = tuple(parameter.shape)
    return torch.sparse_coo_tensor(
        torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *shape[sparse_dim:]), dtype=parameter.dtype, device=parameter.device),
        shape,
        check_invariants=False,
    )
