"""Optimizers: state kept by the *names* of parameters, in the dtypes it had.

`Optimizer.load_state_dict` maps by position and casts to the parameter's dtype; both lose exactness
without a word (equal shapes in another order, 32-bit moments of a 16-bit parameter). So state is put
into `optimizer.state` and `optimizer.param_groups` directly, the two documented attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch.modules import parameter_names
from unbroken.state.handlers import ORDER_OPTIMIZER, Difference, Setting


class OptimizerHandler:
    """`torch.optim.Optimizer`; `parts` is where the names of its parameters come from."""

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
                    "options": {key: item for key, item in group.items() if key not in _NOT_OPTIONS},
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
        if len(live["groups"]) != len(state["groups"]):
            text = f"{len(live['groups'])} parameter groups, the checkpoint has {len(state['groups'])}"
            return [Difference("other", "", text)]
        found = []
        for index, (mine, saved) in enumerate(zip(live["groups"], state["groups"], strict=True)):
            found += _group_differences(index, mine, saved)
        return found

    def restore(self, value: Any, state: Any) -> None:
        by_name = {
            name: parameter
            for parameter, name in zip(_all_parameters(value), self._ordered_names(value), strict=True)
        }
        for group, saved in zip(value.param_groups, state["groups"], strict=True):
            # The saved order of parameters is part of the state: updates may be summed in it.
            group["params"] = [by_name[name] for name in saved["params"]]
            for key, item in saved["options"].items():
                group[key] = _place_option(item, group.get(key))
        value.state.clear()
        on_device = _stepping_on_device(value)
        for name, entries in state["state"].items():
            parameter = by_name[name]
            # What stays where it was loaded; the rest goes to the device of its parameter.
            stays = set() if id(parameter) in on_device else {"step"}
            value.state[parameter] = {
                key: item if key in stays else _place(item, parameter) for key, item in entries.items()
            }

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        return [
            Setting(key, saved["options"][key], mine, where=f"group {index}")
            for index, (group, saved) in enumerate(zip(value.param_groups, state["groups"], strict=True))
            for key, mine in group.items()
            if key in saved["options"] and key not in _MOVING and _differ(mine, saved["options"][key])
        ]

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

    def _ordered_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        names = self._names(optimizer)
        return [names[id(parameter)] for parameter in _all_parameters(optimizer)]


# `param_names` is a copy of names that torch keeps for its own loader.
_NOT_OPTIONS = {"params", "param_names"}
# What schedulers change while training runs is no setting.
_MOVING = {*_NOT_OPTIONS, "lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr", "base_momentum"}


def class_name(value: object) -> str:
    """Return the full name of the class of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _differ(mine: object, saved: object) -> bool:
    if isinstance(mine, torch.Tensor) or isinstance(saved, torch.Tensor):
        return not (isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor) and mine.equal(saved))
    return mine != saved


def _all_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _group_differences(index: int, live: dict[str, Any], saved: dict[str, Any]) -> list[Difference]:
    mine, theirs = set(live["params"]), set(saved["params"])
    where = f"group {index}"
    found = [
        Difference("missing", name, f"{where}: the checkpoint lacks parameter {name}")
        for name in sorted(mine - theirs)
    ]
    found += [
        Difference("unexpected", name, f"{where}: the optimizer lacks parameter {name}")
        for name in sorted(theirs - mine)
    ]
    unknown = set(saved["options"]) - set(live["options"])
    # initial_lr is written by schedulers, which may not have been built in the same order.
    return found + [
        Difference("other", where, f"the optimizer lacks option {key}")
        for key in sorted(unknown - {"initial_lr"})
    ]


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


def _stepping_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters whose step count lies beside them: capturable and fused flavours."""
    return {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }


def _place_option(item: Any, live: Any) -> Any:
    """Return an option of a group; one that is a tensor (a capturable lr) keeps its identity."""
    if isinstance(live, torch.Tensor) and isinstance(item, torch.Tensor) and live.shape == item.shape:
        return live.copy_(item)
    return copy.deepcopy(item)
