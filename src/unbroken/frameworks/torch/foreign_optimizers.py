"""The state_dict of an optimizer in a file, whose parameters are numbers: told apart by their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unbroken.frameworks.torch.foreign_values import UnlikeError, like
from unbroken.frameworks.torch.moments import kept, moments_of, refusal
from unbroken.frameworks.torch.param_groups import FLAVOURS, NOT_OPTIONS, OF_SCHEDULERS, group_name
from unbroken.frameworks.torch.tensors import TorchTensor
from unbroken.frameworks.torch.wrappers import WRAPPED_AS
from unbroken.state.handlers import Difference
from unbroken.state.tensors import TensorSource

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
# By it alone AdamW is told from Adam.
_DECOUPLED = "decoupled_weight_decay"
_FEW = 3

Translated = tuple[dict[str, Any], list[Difference], list[str]]


def optimizer_state(
    optimizer: torch.optim.Optimizer, live: Mapping[str, Any], found: Mapping[str, Any]
) -> Translated:
    """Return the state that a file has for `optimizer`, what differs beyond shapes, and notes.

    `live` is its state as it is, with the names of its parameters; `found` is a state_dict of torch.
    """
    groups = found[_GROUPS]
    unlike = _other_groups(live["groups"], groups)
    if unlike:
        # What cannot be laid side by side is not compared further: nothing allows it.
        return dict(live), unlike, []
    names, differences = _names(live["groups"], groups)
    options = [
        _options(index, mine["options"], saved, differences)
        for index, (mine, saved) in enumerate(zip(live["groups"], groups, strict=True))
    ]
    entries = _entries(found[_STATE], names, differences)
    notes = ["its parameters are taken by their order, as torch numbers them"] if names else []
    if not differences:
        notes += _compare_moments(optimizer, options, live["groups"], entries, differences)
    state = {
        "class": live["class"],
        "groups": [
            {"params": group["params"], "options": of_group}
            for group, of_group in zip(live["groups"], options, strict=True)
        ],
        "state": entries,
        **_beside(live, found, differences),
    }
    return state, differences, notes


def _other_groups(live: Sequence[Mapping[str, Any]], groups: Any) -> list[Difference]:
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return [Difference("other", "", "the checkpoint has parameter groups that are none of torch")]
    if len(live) != len(groups):
        text = f"{len(live)} parameter groups, the checkpoint has {len(groups)}"
        return [Difference("other", "", text)]
    return [
        Difference(
            "other",
            group_name(index),
            f"{len(mine['params'])} parameters, the checkpoint has {len(saved['params'])}",
        )
        for index, (mine, saved) in enumerate(zip(live, groups, strict=True))
        if len(mine["params"]) != len(saved["params"])
    ]


def _names(
    live: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, str], list[Difference]]:
    """Return the name here of each number there, and where names that the file has too are others."""
    names: dict[str, str] = {}
    differences: list[Difference] = []
    for index, (mine, saved) in enumerate(zip(live, groups, strict=True)):
        for number, name in zip(saved["params"], mine["params"], strict=True):
            if type(number) is not int or str(number) in names:
                text = f"parameter {str(number)[:40]!r} of the checkpoint, expected a number of its own"
                differences.append(Difference("other", group_name(index), text))
            names[str(number)] = name
    return names, [*differences, *_other_names(live, groups)]


def _other_names(live: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return where a file that has names of parameters, too, has another one in a place."""
    said: list[Any] = [saved.get("param_names") for saved in groups]
    counts = [len(group["params"]) for group in live]
    if [len(of) if isinstance(of, list) else -1 for of in said] != counts:
        return []
    mine = [(group_name(index), name) for index, group in enumerate(live) for name in group["params"]]
    short = [name.partition(".")[2] for _, name in mine]
    theirs = _alike([_without_wrappers(str(name)) for of in said for name in of], short)
    return [
        Difference("other", name, f"in its place in {where} the checkpoint has {there}")
        for (where, name), here, there in zip(mine, short, theirs, strict=True)
        if here != there
    ]


def _alike(theirs: list[str], mine: list[str]) -> list[str]:
    """Return names without what all of them begin with, if they are then those of `mine` in some order.

    Else of their order nothing is known, and `mine` are returned.
    """
    while set(theirs) != set(mine):
        heads = {name.partition(".")[0] for name in theirs}
        if len(heads) != 1 or not all("." in name for name in theirs):
            return mine
        theirs = [name.partition(".")[2] for name in theirs]
    return theirs


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in WRAPPED_AS)


def _options(
    index: int, live: Mapping[str, Any], saved: Mapping[str, Any], differences: list[Difference]
) -> dict[str, Any]:
    # How the arithmetic is done is the script's choice, and stays that.
    where, found = group_name(index), {key: live[key] for key in FLAVOURS & live.keys()}
    for key, item in saved.items():
        if key in NOT_OPTIONS | FLAVOURS:
            continue
        if key not in live and key not in OF_SCHEDULERS:
            text = "the checkpoint has this option, the optimizer none: it may be of another class"
            differences.append(Difference("unexpected", f"{where} {key}", text))
            continue
        try:
            found[key] = like(live.get(key), item, f"{where} {key}")
        except UnlikeError as error:
            differences.append(Difference("other", error.where, error.text))
    if live.get(_DECOUPLED, found.get(_DECOUPLED)) != found.get(_DECOUPLED, live.get(_DECOUPLED)):
        text = f"{live[_DECOUPLED]} here, {found[_DECOUPLED]} in the checkpoint: it is of another class"
        differences.append(Difference("other", f"{where} {_DECOUPLED}", text))
    return found


def _entries(
    state: Mapping[str, Any], names: Mapping[str, str], differences: list[Difference]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, entries in state.items():
        name = names.get(number)
        if name is None or not isinstance(entries, dict):
            text = "the checkpoint keeps this for no parameter of a group"
            differences.append(Difference("unexpected", f"state {number[:40]}", text))
        else:
            found[name] = entries
    # In the order of the parameters, as an optimizer makes them.
    return {name: found[name] for name in names.values() if name in found}


def _compare_moments(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[str, Mapping[str, Any]],
    differences: list[Difference],
) -> list[str]:
    """Compare what a file keeps for each parameter with what this optimizer would; return notes."""
    expected = moments_of(optimizer, options)
    kind = type(optimizer).__name__
    of_groups = [[entries.get(name, {}) for name in group["params"]] for group in groups]
    reason = refusal(optimizer, options, of_groups)
    if reason is not None:
        text = f"a {kind} does not take what the checkpoint has: {reason[:99]}"
        differences.append(Difference("other", "", text))
        return []
    if expected is None:
        return [f"what a {kind} keeps for a parameter is not known before it steps: it is taken as it is"]
    unstepped = []
    for group, of_group in zip(groups, expected, strict=True):
        for name, keys in zip(group["params"], of_group, strict=True):
            saved = kept(entries.get(name, {}))
            if name not in entries and keys:
                unstepped.append(name)
            elif saved.keys() != keys.keys():
                text = f"a {kind} keeps {_listed(keys)}, the checkpoint has {_listed(saved)}"
                differences.append(Difference("other", name, text))
            else:
                differences += _other_kinds(name, keys, saved)
    if unstepped and not entries:
        text = f"a {kind} keeps {_listed(expected[0][0])} for each parameter, the checkpoint has nothing"
        differences.append(Difference("other", "", text))
    elif unstepped:
        more = f" and {len(unstepped) - _FEW} more" if len(unstepped) > _FEW else ""
        words = f"{', '.join(unstepped[:_FEW])}{more}"
        return [f"it has nothing for {words}, as for what never had a gradient"]
    return []


def _other_kinds(name: str, expected: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield which of what is kept for a parameter is a tensor on one side only, or one of more dimensions."""
    for key, item in saved.items():
        mine, theirs = _dimensions(expected[key]), _dimensions(item)
        # Older releases kept counts as numbers.
        is_count = key == _STEP and isinstance(item, int | float)
        if mine != theirs and not is_count:
            found = "no tensor" if theirs is None else f"a tensor of {theirs} dimensions"
            wanted = "no tensor" if mine is None else f"a tensor of {mine} dimensions"
            yield Difference("other", name, f"{key} is {found} in the checkpoint, here {wanted}")
        elif mine is not None and theirs is not None and key != _STEP:
            # An optimizer that takes over another dtype as it is fails in its next step, or rounds otherwise.
            wanted, found = TorchTensor(expected[key]).dtype, _dtype(item)
            if wanted != found:
                yield Difference("other", name, f"{key} is of {found} in the checkpoint, here of {wanted}")


def _dtype(item: TensorSource | torch.Tensor) -> str:
    return item.dtype if isinstance(item, TensorSource) else TorchTensor(item).dtype


def _dimensions(item: Any) -> int | None:
    return len(item.shape) if isinstance(item, TensorSource | torch.Tensor) else None


def _listed(keys: Any) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _beside(
    live: Mapping[str, Any], found: Mapping[str, Any], differences: list[Difference]
) -> dict[str, Any]:
    """Return what the state_dict() of a class of the user's has beside that of torch."""
    rest = {key: item for key, item in found.items() if key not in (_STATE, _GROUPS)}
    own = live.get("own", {})
    for key in [key for key in rest if key not in own]:
        differences.append(Difference("unexpected", key, "the optimizer keeps no such thing"))
        del rest[key]
    try:
        rest = {key: like(own[key], item, key) for key, item in rest.items()}
    except UnlikeError as error:
        differences.append(Difference("other", error.where, error.text))
    return {"own": rest} if own else {}
