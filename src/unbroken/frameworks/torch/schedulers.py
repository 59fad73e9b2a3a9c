"""Learning-rate schedulers: their state, never a re-computation from the step."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch import horizons, parting
from unbroken.frameworks.torch.class_names import class_differences, class_name, moved_class
from unbroken.frameworks.torch.param_groups import group_name, plain
from unbroken.frameworks.torch.schedule_settings import (
    added,
    changed,
    inner_schedulers,
    listed,
    setting_attributes,
    walk,
)
from unbroken.state.handlers import ORDER_SCHEDULER, Difference, Horizon, Setting


class SchedulerHandler:
    """`torch.optim.lr_scheduler.LRScheduler`, restored before the optimizer, whose rate must win.

    `parts` tells whether the optimizer is one of them; without it, that is not looked at.
    """

    name = "torch.scheduler"
    order = ORDER_SCHEDULER

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        self._parts = parts

    def accepts(self, value: object) -> bool:
        return isinstance(value, LRScheduler)

    def state(self, value: Any) -> object:
        _refuse_bare_functions(value)
        return {"class": class_name(value), "state": value.state_dict()}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return class_differences(value, state["class"]) or _inner_differences(
            value, value.state_dict(), state["state"], ""
        )

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state["state"])

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        found = moved_class(value, state["class"])
        found += self._rates_without_optimizer(value, state["state"])
        found += added(value.state_dict(), state["state"])
        for where, scheduler, inner_state in walk(value, state["state"]):
            found += changed(where, scheduler, inner_state)
            if isinstance(scheduler, LambdaLR):
                found += _changed_functions(where, scheduler, inner_state)
        return found

    def script_settings(self, value: Any) -> list[Setting]:
        return [
            setting
            for where, scheduler, _ in walk(value, value.state_dict())
            for setting in listed(where, scheduler)
        ]

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        schedulers = {where: scheduler for where, scheduler, _ in walk(value, value.state_dict())}
        for setting in settings:
            scheduler = schedulers.get(setting.where)
            name = setting_attributes(scheduler).get(setting.key) if scheduler else None
            if scheduler and name is not None:
                # Not by setattr: some schedulers derive functions from what they load.
                scheduler.load_state_dict({**scheduler.state_dict(), name: setting.script})

    def with_horizon(self, value: Any, state: Any, how: Horizon) -> Callable[[], None]:
        """Return what puts `how` in force; without a changed horizon that is nothing."""
        if any(setting.is_horizon for setting in self.changed_settings(value, state)):
            return horizons.with_horizon(value, how)
        return lambda: None

    def settle(self, value: Any, restored: Collection[str]) -> Callable[[], list[tuple[str, Setting]]]:
        return parting.settle(value, self._parts or {}, restored)

    def _rates_without_optimizer(self, value: Any, state: Mapping[str, Any]) -> list[Setting]:
        """Return the rates that will not be restored, since they stand in an optimizer that is no part."""
        if self._parts is None or any(part is value.optimizer for part in self._parts.values()):
            return []
        found = []
        groups, rates = value.optimizer.param_groups, state.get("_last_lr", [])
        for index, (group, rate) in enumerate(zip(groups, rates, strict=False)):
            mine, theirs = plain(group["lr"]), plain(rate)
            if mine != theirs:
                note = (
                    f"{group_name(index)} lr: {mine!r} of the optimizer, which is no part, is used, "
                    f"the checkpoint has {theirs!r}: pass the optimizer to Run as well"
                )
                found.append(Setting("lr", theirs, mine, where=group_name(index), note=note))
        return found


def _inner_differences(
    scheduler: Any, live: Mapping[str, Any], saved: Mapping[str, Any], where: str
) -> list[Difference]:
    """Return how the schedulers and callables inside differ in number and kind from the saved ones."""
    found = _callable_differences(live, saved, where)
    mine, theirs = live.get("_schedulers", ()), saved.get("_schedulers", ())
    if len(mine) != len(theirs):
        text = f"{len(mine)} schedulers inside, the checkpoint has {len(theirs)}"
        return [*found, Difference("other", where, text)]
    for index, inner in enumerate(inner_schedulers(scheduler)):
        place = f"{where} schedulers {index} ({type(inner).__name__})".strip()
        names, others = _public(mine[index]), _public(theirs[index])
        if names != others:
            text = f"a scheduler with {_listed(names)}, the checkpoint has one with {_listed(others)}"
            found.append(Difference("other", place, text))
        else:
            found += _inner_differences(inner, mine[index], theirs[index], place)
    return found


def _callable_differences(live: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> list[Difference]:
    mine, theirs = live.get("lr_lambdas", []), saved.get("lr_lambdas", [])
    if [one is None for one in mine] == [one is None for one in theirs]:
        return []
    text = f"{_kinds(mine)}, the checkpoint has {_kinds(theirs)}"
    return [Difference("other", f"{where} lr_lambda".strip(), text)]


def _kinds(functions: Sequence[Any]) -> str:
    return ", ".join("a function" if one is None else "an object with attributes" for one in functions)


def _public(state: Mapping[str, Any]) -> set[str]:
    # What begins with an underscore comes and goes with the releases of torch.
    return {name for name in state if not name.startswith("_")}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names - {"base_lrs", "last_epoch"})) or "no settings"


def _changed_functions(where: str, scheduler: LambdaLR, state: Mapping[str, Any]) -> list[Setting]:
    """Return the groups for which the script's function gives another rate than the checkpoint has."""
    step = state["last_epoch"]
    if step < 0:
        # Inside another scheduler, and not its turn yet.
        return []
    found = []
    rates = zip(scheduler.lr_lambdas, state["base_lrs"], state["_last_lr"], strict=False)
    for index, (function, base, last) in enumerate(rates):
        # An object may count its calls; a function has nothing to count with.
        if not _is_function(function):
            continue
        mine, theirs = float(base * function(step)), float(last)
        if not math.isclose(mine, theirs, rel_tol=1e-6, abs_tol=1e-12):
            place = f"{where} {group_name(index)}".strip()
            note = (
                f"{place} lr: the function of the script gives {mine!r} at step {step}, the checkpoint "
                f"has {theirs!r}; the script's decides from the next step on"
            )
            found.append(Setting("lr_lambda", theirs, mine, where=place, note=note))
    return found


def _is_function(value: object) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    return isinstance(value, types.FunctionType)


def _refuse_bare_functions(scheduler: Any) -> None:
    """Raise UnsupportedStateError for a callable whose attributes torch would look for in vain."""
    for place, function in _functions(scheduler, ""):
        if function is not None and not hasattr(function, "__dict__"):
            cls = type(function)
            raise UnsupportedStateError(
                f"{place}: cannot keep a callable of type {cls.__module__}.{cls.__qualname__}, "
                "which has no attributes",
                hint="call it in a function of your own, such as a lambda",
            )


def _functions(scheduler: Any, where: str) -> Iterator[tuple[str, Any]]:
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"{where}lr_lambda {index}", function
    yield f"{where}scale_fn", getattr(scheduler, "_scale_fn_custom", None)
    for index, inner in enumerate(inner_schedulers(scheduler)):
        yield from _functions(inner, f"{where}schedulers {index}: ")
