"""Optimizers: state kept by the *names* of parameters, in the dtypes it had.

`Optimizer.load_state_dict` maps by position and casts to the parameter's dtype; both lose exactness
without a word (equal shapes in another order, 32-bit moments of a 16-bit parameter). So state is put
into `optimizer.state` and `optimizer.param_groups` directly, the two documented attributes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.torch.class_names import class_differences, class_name, moved_class
from unbroken.frameworks.torch.modules import parameter_names
from unbroken.frameworks.torch.optimizer_state import (
    beside_differences,
    beside_parameters,
    cast_differences,
    cast_entries,
    changed_counts,
    placed_entries,
    restore_others,
    restore_own,
    shape_differences,
)
from unbroken.frameworks.torch.param_groups import (
    FLAVOURS,
    added_group_differences,
    added_group_settings,
    changed_options,
    group_differences,
    group_name,
    options_of,
    options_set_by_script,
    parameters_by_name,
    put_base_rate,
    put_option,
    put_options,
    rate_for_base,
)
from unbroken.frameworks.torch.schedule_settings import follow
from unbroken.state.handlers import ORDER_OPTIMIZER, Difference, Renamed, Setting, TensorFacts
from unbroken.state.tree import join


class OptimizerHandler:
    """`torch.optim.Optimizer`; `parts` is where the names of its parameters come from.

    The flavours (fused, foreach, capturable, differentiable) are the script's and outlive a restore;
    everything else in the groups is the checkpoint's, unless it is overridden.
    """

    name = "torch.optimizer"
    order = ORDER_OPTIMIZER
    tensor_facts = TensorFacts(
        are_streamed=True, are_placed=True, settings="groups/*/options/*", below="state", are_trained=True
    )

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
                names[id(parameter)]: dict(entries)
                for group in value.param_groups
                for parameter in group["params"]
                # Asked once: the hash of a tensor is a call into Python. No entry is made by it.
                if (entries := value.state.get(parameter)) is not None
            },
            **beside_parameters(value),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live: Any = self.state(value)
        others = class_differences(value, state["class"])
        if others:
            return others
        if len(live["groups"]) > len(state["groups"]):
            text = f"{len(live['groups'])} parameter groups, the checkpoint has {len(state['groups'])}"
            return [Difference("other", "", text)]
        found = beside_differences(live, state)
        for index, (mine, saved) in enumerate(zip(live["groups"], state["groups"], strict=False)):
            found += group_differences(index, mine, saved)
        available = parameters_by_name(self._parts)
        found += added_group_differences(live["groups"], state["groups"], available)
        for name, entries in state["state"].items():
            if name in available:
                found += shape_differences(value, name, available[name], entries)
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
        restore_own(value, state)
        self._restore_state(value, state)
        # As torch ends its own loading: counts that older releases kept as numbers become tensors.
        value.__setstate__({"state": value.state, "param_groups": value.param_groups})
        restore_others(value, state)

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        found = moved_class(value, state["class"])
        has_schedule = any(self._schedulers_of(value))
        for index, (group, saved) in enumerate(zip(value.param_groups, state["groups"], strict=False)):
            settings = changed_options(index, group, saved["options"])
            # Without a base rate, as ReduceLROnPlateau leaves it, the present one is not the script's.
            moves = has_schedule and "initial_lr" not in group
            found += [
                dataclasses.replace(setting, moves=moves and setting.key == "lr") for setting in settings
            ]
        found += added_group_settings(len(value.param_groups), state["groups"])
        return found + changed_counts(value, state["state"])

    def script_settings(self, value: Any) -> list[Setting]:
        # These take no notice of the rate that an optimizer is built with.
        is_deaf = any(isinstance(one, OneCycleLR | CyclicLR) for one in self._schedulers_of(value))
        return [
            Setting(key, None, item, where=group_name(index))
            for index, group in enumerate(value.param_groups)
            for key, item in options_set_by_script(group).items()
            if not (is_deaf and key == "lr")
        ]

    def cast_differences(self, value: Any, state: Any, names: Collection[str]) -> list[Difference]:
        available = parameters_by_name(self._parts)
        return [
            difference
            for name, entries in state["state"].items()
            if name in names and name in available
            for difference in cast_differences(value, name, available[name], entries)
        ]

    def cast(self, value: Any, state: Any, names: Collection[str]) -> object:
        available = parameters_by_name(self._parts)
        kept = {
            name: cast_entries(entries, available[name]) if name in names and name in available else entries
            for name, entries in state["state"].items()
        }
        return {**state, "state": kept}

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
                    follow(scheduler, index, rates[where], present[where])
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
                if entries is not None and not shape_differences(optimizer, name, parameter, entries):
                    restored[parameter] = placed_entries(entries, parameter, on_device)
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
