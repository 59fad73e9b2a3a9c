"""The options of an optimizer's parameter groups: what differs, who sets what, and putting them back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unbroken.frameworks.torch.modules import parameter_names
from unbroken.state.handlers import Difference, Setting
from unbroken.state.tree import join

# How the arithmetic is carried out on this machine: the script's business, never the checkpoint's.
FLAVOURS = frozenset({"fused", "foreach", "capturable", "differentiable"})
# `param_names` is a copy of names that torch keeps for its own loader.
NOT_OPTIONS = frozenset({"params", "param_names"})
# Schedulers write these into the groups, and need not have been built in the same order.
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})

_FEW = 4


def group_name(index: int) -> str:
    """Return what a group is called in reports."""
    return f"group {index}"


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters."""
    return {key: item for key, item in group.items() if key not in NOT_OPTIONS}


def group_differences(index: int, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Difference]:
    """Return how a group differs from the saved one; both as in an optimizer's state."""
    mine, theirs = set(live["params"]), set(saved["params"])
    where = group_name(index)
    found = [
        Difference("missing", name, f"{where}: the checkpoint lacks parameter {name}")
        for name in sorted(mine - theirs)
    ]
    found += [
        Difference("unexpected", name, f"{where}: the optimizer lacks parameter {name}")
        for name in sorted(theirs - mine)
    ]
    return found


def parameters_by_name(parts: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the parameters that `parts` hold, those too that no optimizer trains yet."""
    names = parameter_names(parts)
    return {
        names[id(item)]: item for value in parts.values() for item in _tensors_in(value) if id(item) in names
    }


def _tensors_in(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, nn.Module):
        return value.parameters()
    items: Iterable[object] = [value]
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
    return (item for item in items if isinstance(item, torch.Tensor))


def added_group_differences(
    live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], available: Iterable[str]
) -> list[Difference]:
    """Return why the saved groups that `live` lacks cannot be added again from `available` parameters."""
    known = set(available)
    taken = {name for group in live for name in group["params"]}
    found = []
    for index, group in enumerate(saved[len(live) :], start=len(live)):
        for name in group["params"]:
            if name not in known or name in taken:
                text = "is in another group here" if name in taken else "is in no part of the program"
                text = f"{group_name(index)} was added while training ran, and its parameter {name} {text}"
                found.append(Difference("other", name, text))
    return found


def added_group_settings(live_count: int, saved: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Return a line for each saved group that a restore adds again."""
    found = []
    for index, group in enumerate(saved[live_count:], start=live_count):
        where, names = group_name(index), group["params"]
        which = f"{len(names)} parameters from {names[0]}" if len(names) > 1 else "".join(names)
        note = f"{where} ({which}) was added while training ran: added again"
        found.append(Setting("params", list(names), [], where=where, note=note))
    return found


def changed_options(index: int, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Setting]:
    """Return the options that the script set otherwise than the checkpoint has them."""
    where = group_name(index)
    mine, theirs = _set_by_script(live), _set_by_script(saved)
    if "max_momentum" in mine:
        # Momentum goes up and down with the rate there.
        mine, theirs = _without_momentum(mine), _without_momentum(theirs)
    found = []
    for key in mine:
        if key in theirs and mine[key] != theirs[key]:
            setting = Setting(key, theirs[key], mine[key], where=where)
            if key in FLAVOURS:
                note, places = setting.text(script_wins=True), (_place_of(index, key),)
                setting = dataclasses.replace(setting, note=note, places=places)
            found.append(setting)
    return [*found, *_on_one_side(index, live, saved), *_changed_types(index, live, saved)]


def options_set_by_script(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a group as the script built it that it may override, without tensors."""
    found = _set_by_script(group)
    if "max_momentum" in found:
        found = _without_momentum(found)
    return {key: item for key, item in found.items() if key not in FLAVOURS}


def _on_one_side(index: int, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Setting]:
    """Return a line for each option that only the script has, or only the checkpoint; both are in force."""
    where, mine = group_name(index), options_of(live)
    found = []
    for key in sorted(mine.keys() - saved.keys()):
        note = f"{where} {key}: {_shown(mine[key])} of the script is used, the checkpoint has no such option"
        place = _place_of(index, key)
        found.append(Setting(key, None, plain(mine[key]), where=where, note=note, places=(place,)))
    # Made by `step()` or by the loop; or by schedulers, of which other lines tell.
    for key in sorted(saved.keys() - mine.keys() - OF_SCHEDULERS - FLAVOURS):
        note = f"{where} {key}: {_shown(saved[key])} is kept, the script has no such option so far"
        found.append(Setting(key, plain(saved[key]), None, where=where, note=note))
    return found


def _shown(item: Any) -> str:
    is_long = isinstance(item, torch.Tensor) and item.numel() > _FEW
    return f"a tensor of shape {tuple(item.shape)}" if is_long else repr(plain(item))


def _place_of(index: int, key: str) -> str:
    return join(f"groups/{index}/options", key)


def _changed_types(index: int, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Setting]:
    """Return the options that are a tensor on one side and a number on the other."""
    where = group_name(index)
    found = []
    for key, item in options_of(live).items():
        mine, theirs = _kind(item), _kind(saved.get(key))
        if key in saved and mine != theirs and (isinstance(item, torch.Tensor) or "Tensor" in theirs):
            note = f"{where} {key}: a {mine} as in the script, the checkpoint has a {theirs}"
            places = (_place_of(index, key),)
            found.append(Setting(f"type of {key}", theirs, mine, where=where, note=note, places=places))
    return found


def _kind(item: Any) -> str:
    if not isinstance(item, torch.Tensor):
        return type(item).__name__
    is_usual = item.dtype == torch.float32 and not item.dim()
    return "Tensor" if is_usual else f"Tensor of {item.dtype} and shape {tuple(item.shape)}"


def _set_by_script(options: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: plain(item) for key, item in options.items() if key not in NOT_OPTIONS}
    if "lr" in found:
        # The present rate moves; schedulers leave the one that they began with.
        found["lr"] = found.pop("initial_lr", found["lr"])
    return found


def _without_momentum(options: dict[str, Any]) -> dict[str, Any]:
    kept = {key: item for key, item in options.items() if key not in ("momentum", "betas")}
    return kept | ({"betas": options["betas"][1:]} if "betas" in options else {})


def plain(value: Any) -> Any:
    """Return an option with numbers in place of tensors, independent of them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return copy.deepcopy(value)


def put_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put saved options into a group, all but the flavours that it has."""
    for key, item in saved.items():
        if key not in FLAVOURS or key not in group:
            put_option(group, key, item)


def put_option(group: dict[str, Any], key: str, item: Any) -> None:
    """Set an option; one that is a tensor, as a capturable rate is, stays the same tensor."""
    if key in group:
        group[key] = placed(item, group[key])
    elif isinstance(item, torch.Tensor) and item.dim():
        # A single number may stay on the host, whatever it is used with.
        group[key] = item.detach().clone().to(group["params"][0].device)
    else:
        group[key] = copy.deepcopy(item)


def placed(item: Any, live: Any) -> Any:
    """Return `item` in the kind of `live`; where that is a tensor, it is filled."""
    if isinstance(live, torch.Tensor):
        loaded = item if isinstance(item, torch.Tensor) else torch.as_tensor(item, dtype=live.dtype)
        with torch.no_grad():
            return live.copy_(loaded.reshape(live.shape))
    if isinstance(item, torch.Tensor) and isinstance(live, int | float):
        # Some flavours cannot take a tensor there; which kind it is, is the script's choice.
        return item.item()
    if type(item) is tuple and type(live) is tuple and len(item) == len(live):
        return tuple(placed(one, other) for one, other in zip(item, live, strict=True))
    return copy.deepcopy(item)


def base_rate(options: Mapping[str, Any]) -> Any:
    """Return the learning rate that the script set: the one that schedulers reckon from."""
    return plain(options.get("initial_lr", options["lr"]))


def rate_for_base(group: Mapping[str, Any], base: float) -> float:
    """Return the present learning rate of a group in proportion to another base rate."""
    old = base_rate(group)
    return float(plain(group["lr"]) * (base / old)) if old else base


def put_base_rate(group: dict[str, Any], base: float, present: float) -> None:
    """Give a group another base learning rate and the present one that follows from it."""
    put_option(group, "lr", present)
    if "initial_lr" in group:
        put_option(group, "initial_lr", base)
