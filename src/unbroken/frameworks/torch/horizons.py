"""Schedules whose planned length has changed: keep the old curve, stretch to the new one, or hold the rate.

All of it shows in the state of a scheduler as plain data, or not at all: no function ever gets into it.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from unbroken.frameworks.torch.param_groups import base_rate, plain, put_option
from unbroken.frameworks.torch.schedule_settings import HORIZONS, inner_schedulers, setting_attributes
from unbroken.state.handlers import Horizon

# What schedulers move in the groups of an optimizer.
_RATES = ("lr", "momentum", "betas")


def with_horizon(scheduler: LRScheduler, how: Horizon) -> Callable[[], None]:
    """Look at a scheduler as the script built it; return what puts `how` in force once it is restored.

    That may be called again, whenever all has been restored again.
    """
    if how == "stretch":
        return _stretching(scheduler)
    return functools.partial(_go_on, scheduler) if how == "keep" else functools.partial(_hold, scheduler)


def _stretching(scheduler: LRScheduler) -> Callable[[], None]:
    fresh = copy.deepcopy(scheduler.state_dict())
    begin = [(plain(group["lr"]), base_rate(group)) for group in scheduler.optimizer.param_groups]

    def stretch() -> None:
        """Step the scheduler as it was built to where it is; all but its horizon is the checkpoint's."""
        optimizer, groups = scheduler.optimizer, scheduler.optimizer.param_groups
        steps = _steps_done(scheduler)
        # A group added in mid-training was not there at the first of these steps: its rate stays.
        optimizer.param_groups = groups[: len(begin)]
        try:
            for group, (rate, base) in zip(optimizer.param_groups, begin, strict=True):
                put_option(group, "lr", rate * (base_rate(group) / base) if base else rate)
            scheduler.load_state_dict(_with_horizon_of(scheduler, fresh))
            with warnings.catch_warnings():
                # No optimizer steps between these, which torch would remark upon.
                warnings.simplefilter("ignore")
                for _ in range(steps):
                    scheduler.step()
        finally:
            optimizer.param_groups = groups

    return stretch


def _with_horizon_of(scheduler: LRScheduler, fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the `fresh` state with what the live one has for everything but horizons and progress."""
    merged = copy.deepcopy(fresh)
    for inner, state in _with_states(scheduler, merged):
        kept = [name for key, name in setting_attributes(inner).items() if key not in HORIZONS]
        state.update(
            {name: copy.deepcopy(vars(inner)[name]) for name in (*kept, "base_lrs") if name in state}
        )
    return merged


def _with_states(scheduler: Any, state: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield scheduler, state
    for inner, inner_state in zip(inner_schedulers(scheduler), state.get("_schedulers", []), strict=True):
        yield from _with_states(inner, inner_state)


def _steps_done(scheduler: Any) -> int:
    if hasattr(scheduler, "last_epoch"):
        return max(int(scheduler.last_epoch), 0)
    # Chained schedulers step together and keep no count of their own.
    return max(_steps_done(inner) for inner in inner_schedulers(scheduler))


def _go_on(scheduler: Any) -> None:
    """Let a schedule hold its last rate past its end, where torch would raise an error."""
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch > (end := _last_step(scheduler)):
        # Its last step overshoots: the rate has gone up again, for an optimizer step that never came.
        counts = scheduler.last_epoch, scheduler._step_count
        scheduler.last_epoch = end - 1
        scheduler.step()
        scheduler.last_epoch, scheduler._step_count = counts
    _end_never(scheduler)


def _end_never(scheduler: Any) -> None:
    for inner in inner_schedulers(scheduler):
        _end_never(inner)
    if isinstance(scheduler, OneCycleLR) and not math.isinf(_last_step(scheduler)):
        # From the present rate to the present rate, for ever.
        held: Any = {"end_step": math.inf, "start_lr": "lr", "end_lr": "lr"}
        held |= {"start_momentum": "max_momentum", "end_momentum": "max_momentum"}
        scheduler._schedule_phases = [*scheduler._schedule_phases, held]
        scheduler.total_steps = math.inf  # type: ignore[assignment]


def _last_step(scheduler: OneCycleLR) -> Any:
    return scheduler._schedule_phases[-1]["end_step"]


def _hold(scheduler: Any) -> None:
    """Keep the present rates: from now on the scheduler counts its steps and changes nothing else."""
    _go_on(scheduler)
    if not getattr(type(scheduler), "_holds_rates", False):
        # Not a function of the instance: that would stand in its state.
        scheduler.__class__ = _holding(type(scheduler))


def _holding(cls: type[Any]) -> type[Any]:
    """Return a class that goes by the name of `cls`, whose steps leave the rates alone."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        groups = self.optimizer.param_groups
        held = [{key: plain(group[key]) for key in _RATES if key in group} for group in groups]
        cls.step(self, *args, **kwargs)
        for group, rates in zip(groups, held, strict=True):
            for key, rate in rates.items():
                put_option(group, key, rate)
        self._last_lr = [plain(group["lr"]) for group in groups]

    body = {
        "step": step,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_holds_rates": True,
    }
    return type(cls.__name__, (cls,), body)
