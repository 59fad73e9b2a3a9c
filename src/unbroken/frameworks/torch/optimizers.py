"""Optimizers: state kept by the *names* of parameters, in the dtypes it had.

`Optimizer.load_state_dict` maps by position and casts to the parameter's dtype; both lose exactness
without a word (equal shapes in another order, 32-bit moments of a 16-bit parameter). So state is put
into `optimizer.state` and `optimizer.param_groups` directly, the two documented attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.torch.modules import parameter_names
from unbroken.frameworks.torch.param_groups import (
    FLAVOURS,
    added_group_differences,
    added_group_settings,
    changed_options,
    group_differences,
    group_name,
    options_of,
    parameters_by_name,
    placed,
    put_base_rate,
    put_option,
    put_options,
    rate_for_base,
)
from unbroken.state.handlers import ORDER_OPTIMIZER, Difference, Renamed, Setting
from unbroken.state.tree import join

# Counts of steps, which stay on the host unless the flavour needs them beside the parameter.
_STEP = "step"
# In the optimizers of torch these have one element for each of the parameter's.
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "prev", "step_size", "ax", "variance"}
)


class OptimizerHandler:
    """`torch.optim.Optimizer`; `parts` is where the names of its parameters come from.

    The flavours (fused, foreach, capturable, differentiable) are the script's and outlive a restore;
    everything else in the groups is the checkpoint's, unless it is overridden.
    """

    name = "torch.optimizer"
    order = ORDER_OPTIMIZER

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts

    def accepts(self, value: object) -> bool:
        return isinstance(value, torch.optim.Optimizer)

    def state(self, value: Any) -> object:
        names = self._names(value)
        return {
            "class": class_name(value),
            "groups": [
                {
                    "params": [names[id(parameter)] for parameter in group["params"]],
                    "options": options_of(group),
                }
                for group in value.param_groups
            ],
            "state": {
                names[id(parameter)]: dict(value.state[parameter])
                for group in value.param_groups
                for parameter in group["params"]
                if parameter in value.state
            },
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live: Any = self.state(value)
        if live["class"] != state["class"]:
            text = f"class {live['class']}, the checkpoint has class {state['class']}"
            return [Difference("other", "", text)]
        if len(live["groups"]) > len(state["groups"]):
            text = f"{len(live['groups'])} parameter groups, the checkpoint has {len(state['groups'])}"
            return [Difference("other", "", text)]
        found = []
        for index, (mine, saved) in enumerate(zip(live["groups"], state["groups"], strict=False)):
            found += group_differences(index, mine, saved)
        available = parameters_by_name(self._parts)
        found += added_group_differences(live["groups"], state["groups"], available)
        for name, entries in state["state"].items():
            if name in available:
                found += _shape_differences(value, name, available[name], entries)
        return found

    def restore(self, value: Any, state: Any) -> None:
        available = parameters_by_name(self._parts)
        for saved in state["groups"][len(value.param_groups) :]:
            _add_group(value, saved, available)
        names = self._names(value)
        for group, saved in zip(value.param_groups, state["groups"], strict=True):
            mine = {names[id(parameter)]: parameter for parameter in group["params"]}
            # The saved order of parameters is part of the state: updates may be summed in it.
            kept = {name: mine[name] for name in saved["params"] if name in mine}
            group["params"] = list((kept | mine).values())
            put_options(group, saved["options"])
        self._restore_state(value, state)
        # As torch ends its own loading: counts that older releases kept as numbers become tensors.
        value.__setstate__({"state": value.state, "param_groups": value.param_groups})

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        found = []
        has_schedule = any(self._schedulers_of(value))
        for index, (group, saved) in enumerate(zip(value.param_groups, state["groups"], strict=False)):
            settings = changed_options(index, group, saved["options"])
            # Without a base rate, as ReduceLROnPlateau leaves it, the present one is no setting.
            is_moved = has_schedule and "initial_lr" not in group
            found += [setting for setting in settings if setting.key != "lr" or not is_moved]
        found += added_group_settings(len(value.param_groups), state["groups"])
        return found + _changed_counts(value, state["state"])

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        """Put `settings` in force; a base learning rate takes the present one and the schedulers along."""
        groups: dict[str, Any] = {group_name(index): group for index, group in enumerate(value.param_groups)}
        rates: dict[str, Any] = {setting.where: setting.script for setting in settings if setting.key == "lr"}
        # All before any is set: groups may share one tensor as their rate.
        present = {where: rate_for_base(groups[where], rate) for where, rate in rates.items()}
        for index, (where, group) in enumerate(groups.items()):
            if where in rates:
                put_base_rate(group, rates[where], present[where])
                for scheduler in self._schedulers_of(value):
                    _follow(scheduler, index, rates[where], present[where])
        for setting in settings:
            group = groups.get(setting.where, {})
            if setting.key in group and setting.key not in FLAVOURS | {"lr", "params"}:
                _override_option(group, setting.key, setting.script)

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Renamed:
        paths: dict[str, str] = {}
        moved: dict[str, Any] = {}
        for old, entries in state["state"].items():
            new = rename(old)
            if new in moved:
                raise UsageError(
                    f"rename: expected a name of its own for {old}, found that another becomes {new}, too",
                    hint="map each name of the checkpoint to another one",
                )
            before, after = (join(join(part, "state"), name) for name in (old, new))
            found = {path: after + path[len(before) :] for path in _references(entries)}
            moved[new] = entries
            paths |= found
        groups = [
            {**group, "params": [rename(name) for name in group["params"]]} for group in state["groups"]
        ]
        return Renamed({**state, "groups": groups, "state": moved}, paths)

    def _restore_state(self, optimizer: Any, state: Any) -> None:
        names = self._names(optimizer)
        saved, known = state["state"], {name for group in state["groups"] for name in group["params"]}
        restored: dict[torch.Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                name = names[id(parameter)]
                entries = saved.get(name)
                if entries is not None and not _shape_differences(optimizer, name, parameter, entries):
                    restored[parameter] = _placed_entries(entries, parameter, on_device)
                elif parameter in optimizer.state and (entries is not None or name not in known):
                    # The user allows that it differs: what the optimizer made stays.
                    restored[parameter] = optimizer.state[parameter]
        optimizer.state.clear()
        optimizer.state.update(restored)

    def _schedulers_of(self, optimizer: object) -> Iterator[LRScheduler]:
        waiting = [part for part in self._parts.values() if isinstance(part, LRScheduler)]
        while waiting:
            scheduler = waiting.pop()
            waiting += getattr(scheduler, "_schedulers", [])
            if scheduler.optimizer is optimizer:
                yield scheduler

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        names = parameter_names(self._parts)
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise UnsupportedStateError(
                        f"parameter {index} of group {group_index}, of shape {tuple(parameter.shape)}, "
                        "is trained by this optimizer and belongs to no part: it would not be saved",
                        hint="pass its module, or the parameter itself, as a keyword of Run",
                    )
        return names


def class_name(value: object) -> str:
    """Return the full name of the class of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_of_torch(optimizer: object) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _shape_differences(
    optimizer: torch.optim.Optimizer, name: str, parameter: torch.Tensor, entries: Mapping[str, Any]
) -> list[Difference]:
    """Return which saved tensors of a parameter do not have the shape that this optimizer gives them."""
    made = optimizer.state.get(parameter, {})
    found = []
    for key, item in entries.items():
        like = parameter if _is_of_torch(optimizer) and key in _LIKE_PARAMETER else made.get(key)
        if isinstance(item, torch.Tensor) and isinstance(like, torch.Tensor) and item.shape != like.shape:
            text = f"{key} has shape {tuple(item.shape)} in the checkpoint, here {tuple(like.shape)}"
            found.append(Difference("shape", name, text))
    return found


def _changed_counts(optimizer: object, saved: Mapping[str, Mapping[str, Any]]) -> list[Setting]:
    """Return a line if counts that older releases of torch kept as numbers become tensors."""
    keeps_numbers = isinstance(optimizer, torch.optim.SparseAdam) or not _is_of_torch(optimizer)
    if keeps_numbers or not any(isinstance(entries.get(_STEP), int | float) for entries in saved.values()):
        return []
    note = "step: a tensor here, the checkpoint has numbers, their values are kept"
    return [Setting("type of step", "number", "Tensor", note=note)]


def _add_group(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], available: Mapping[str, torch.Tensor]
) -> None:
    options = {key: copy.deepcopy(item) for key, item in saved["options"].items() if key not in FLAVOURS}
    optimizer.add_param_group({"params": [available[name] for name in saved["params"]], **options})


def _override_option(group: dict[str, Any], key: str, script: Any) -> None:
    if key == "betas" and len(script) < len(group["betas"]):
        # The first one is the momentum, and a scheduler moves it.
        script = (*group["betas"][: -len(script)], *script)
    put_option(group, key, script)


def _follow(scheduler: Any, index: int, base: float, present: float) -> None:
    """Let a scheduler reckon with another base rate of the group at `index`."""
    for rates, rate in ((getattr(scheduler, "base_lrs", []), base), (scheduler._last_lr, present)):
        if index < len(rates):
            rates[index] = placed(rate, rates[index])


def _references(encoded: Any) -> Iterator[str]:
    """Yield the paths of the tensors in an encoded value."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from _references(item)
    elif isinstance(encoded, dict):
        if "$tensor" in encoded:
            yield encoded["$tensor"]
        else:
            for item in encoded.values():
                yield from _references(item)


def _place(item: Any, parameter: torch.Tensor) -> Any:
    """Return a state entry on the device where the optimizer would have made it, in its own dtype."""
    if type(item) in (list, tuple):
        return type(item)(_place(element, parameter) for element in item)
    if type(item) is dict:
        return {name: _place(element, parameter) for name, element in item.items()}
    if not isinstance(item, torch.Tensor):
        return copy.deepcopy(item)
    # Taken over, not copied, where it is there already: it was loaded for this and belongs to nobody else.
    return item.to(device=parameter.device)


def _placed_entries(entries: Mapping[str, Any], parameter: torch.Tensor, on_device: bool) -> dict[str, Any]:
    placed_ones = {key: _place(item, parameter) for key, item in entries.items() if key != _STEP}
    if _STEP not in entries:
        return placed_ones
    step = copy.deepcopy(entries[_STEP])
    if isinstance(step, torch.Tensor):
        step = step.to(parameter.device, torch.float32) if on_device else step.to("cpu")
    return {key: placed_ones.get(key, step) for key in entries}
