"""What an optimizer keeps: for each of its parameters, and beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from unbroken.state.handlers import Difference, Setting
from unbroken.state.tree import join

# Counts of steps, which stay on the host unless the flavour needs them beside the parameter.
_STEP = "step"
# In the optimizers of torch these have one element for each of the parameter's.
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "prev", "step_size", "ax", "variance"}
)
# What every optimizer has in its state_dict; where state is kept here that has another key in `state`
# than a parameter, or another one in a state_dict() of the user's.
_OF_TORCH = frozenset({"state", "param_groups"})
_OTHERS = "others"
_OWN = "own"


def is_of_torch(optimizer: object) -> bool:
    """Tell whether the class of `optimizer` is one of torch's own."""
    return type(optimizer).__module__.partition(".")[0] == "torch"


def shape_differences(
    optimizer: torch.optim.Optimizer, name: str, parameter: torch.Tensor, entries: Mapping[str, Any]
) -> list[Difference]:
    """Return which saved tensors of a parameter do not have the shape that this optimizer gives them."""
    made = optimizer.state.get(parameter, {})
    found = []
    for key, item in entries.items():
        like = parameter if is_of_torch(optimizer) and key in _LIKE_PARAMETER else made.get(key)
        if isinstance(item, torch.Tensor) and isinstance(like, torch.Tensor) and item.shape != like.shape:
            text = f"{key} has shape {tuple(item.shape)} in the checkpoint, here {tuple(like.shape)}"
            found.append(Difference("shape", name, text))
    return found


def changed_counts(optimizer: object, saved: Mapping[str, Mapping[str, Any]]) -> list[Setting]:
    """Return a line if counts that older releases of torch kept as numbers become tensors."""
    numbers = [name for name, entries in saved.items() if isinstance(entries.get(_STEP), int | float)]
    if not numbers or not is_of_torch(optimizer) or isinstance(optimizer, torch.optim.SparseAdam):
        return []
    note = "step: a tensor here, the checkpoint has numbers, their values are kept"
    places = tuple(join(join("state", name), _STEP) for name in numbers)
    return [Setting("type of step", "number", "Tensor", note=note, places=places)]


def placed_entries(entries: Mapping[str, Any], parameter: torch.Tensor, on_device: bool) -> dict[str, Any]:
    """Return the saved entries of a parameter where the optimizer would have made them, as they are."""
    placed_ones = {key: _place(item, parameter) for key, item in entries.items() if key != _STEP}
    if _STEP not in entries:
        return placed_ones
    step = copy.deepcopy(entries[_STEP])
    if isinstance(step, torch.Tensor):
        step = step.to(parameter.device, torch.float32) if on_device else step.to("cpu")
    return {key: placed_ones.get(key, step) for key in entries}


def cast_differences(
    optimizer: object, name: str, parameter: torch.Tensor, entries: Mapping[str, Any]
) -> list[Difference]:
    """Return what a parameter has that follows it to another dtype, or why it cannot."""
    keys = [key for key, item in entries.items() if item is not _cast(key, item, parameter)]
    if not keys:
        return []
    text = f"{', '.join(keys)}: of the dtype that the parameter had, which becomes {parameter.dtype}"
    if is_of_torch(optimizer):
        return [Difference("dtype", name, text)]
    text += f"; how a {type(optimizer).__name__} goes on with that is not known: begin it anew by fresh="
    return [Difference("other", name, text)]


def cast_entries(entries: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the saved entries of a parameter in its dtype, as far as they had the one that it had."""
    return {key: _cast(key, item, parameter) for key, item in entries.items()}


def beside_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps that is of no parameter; nothing for those of torch."""
    others = {key: item for key, item in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    found = {_OTHERS: others, _OWN: _own(optimizer)}
    return {key: items for key, items in found.items() if items}


def beside_differences(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Difference]:
    """Return which entries of a state_dict() of its own the checkpoint lacks."""
    missing = [key for key in live.get(_OWN, {}) if key not in saved.get(_OWN, {})]
    return [
        Difference("missing", str(key), "the checkpoint lacks it, which this state_dict() has")
        for key in missing
    ]


def restore_own(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Have an optimizer load what its state_dict() has beside that of torch."""
    if _OWN not in saved:
        return
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict({**optimizer.state_dict(), **saved[_OWN]})
    # It makes new groups, and states by position: those that were there stay, and are filled by name.
    optimizer.param_groups, optimizer.state = groups, state


def restore_others(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what stands in `optimizer.state` under other keys than parameters."""
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    near = optimizer.param_groups[0]["params"][0]
    for key, item in saved.get(_OTHERS, {}).items():
        # Single numbers may be on the host, whatever they are used with.
        is_scalar = isinstance(item, torch.Tensor) and not item.dim()
        optimizer.state[key] = copy.deepcopy(item) if is_scalar else _place(item, near)


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    hooks = vars(optimizer).get("_optimizer_state_dict_post_hooks")
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not hooks:
        return {}
    return {key: item for key, item in optimizer.state_dict().items() if key not in _OF_TORCH}


def _place(item: Any, near: torch.Tensor) -> Any:
    """Return a state entry on the device where the optimizer would have made it, in its own dtype."""
    if type(item) in (list, tuple):
        return type(item)(_place(element, near) for element in item)
    if type(item) is dict:
        return {name: _place(element, near) for name, element in item.items()}
    if not isinstance(item, torch.Tensor):
        return copy.deepcopy(item)
    # Taken over, not copied, where it is there already: it was loaded for this and belongs to nobody else.
    return item.to(device=near.device)


def _cast(key: str, item: Any, parameter: torch.Tensor) -> Any:
    """Return `item` in the dtype of the parameter if it is made like it; otherwise the very same one."""
    if type(item) is list:
        found = [_cast(key, element, parameter) for element in item]
        return found if any(one is not other for one, other in zip(found, item, strict=True)) else item
    is_made_like = isinstance(item, torch.Tensor) and (key in _LIKE_PARAMETER or item.dim() > 0)
    if not is_made_like or key == _STEP or item.dtype == parameter.dtype:
        return item
    is_number = item.is_floating_point() or item.is_complex()
    return item.to(parameter.dtype) if is_number and item.is_complex() == parameter.is_complex() else item
