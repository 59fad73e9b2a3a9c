"""What of a scheduler's state its script has set, as opposed to what moves while training runs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from unbroken.frameworks.torch.param_groups import placed, plain
from unbroken.state.handlers import Setting
from unbroken.state.tree import join

# How long a schedule is planned to be. Lengths that repeat for ever (step_size, T_0) are none.
HORIZONS = frozenset({"T_max", "total_steps", "total_iters", "milestones", "anneal_epochs", "phases"})
# Base rates are settings of the optimizer; functions and positions are none.
_NO_SETTINGS = frozenset({"self", "optimizer", "schedulers", "last_epoch", "base_lr", "lr_lambda"})
# Settings that schedulers keep under another name than their constructors have, and not in the same form.
_MADE_OF_SETTINGS = {
    "phases": "_schedule_phases",
    "anneal_strategy": "_anneal_func_type",
    "total_size": "total_size",
    "step_ratio": "step_ratio",
}


def inner_schedulers(scheduler: Any) -> Sequence[LRScheduler]:
    """Return the schedulers that this one is made of."""
    found: Sequence[LRScheduler] = getattr(scheduler, "_schedulers", ())
    return found


def setting_attributes(scheduler: LRScheduler) -> dict[str, str]:
    """Return `setting -> attribute` for what the constructor was given and the scheduler still has."""
    attributes = vars(scheduler)
    found = {key: name for key, name in _MADE_OF_SETTINGS.items() if name in attributes}
    for key in inspect.signature(type(scheduler).__init__).parameters:
        names = (key, f"_{key}", f"default_{key}", f"{key}s")
        name = next((name for name in names if attributes.get(name) is not None), None)
        if name is not None and key not in _NO_SETTINGS:
            found[key] = name
    return found


def walk(
    scheduler: LRScheduler, state: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, LRScheduler, Mapping[str, Any]]]:
    """Yield a scheduler and those inside it, each with where it is and the part of `state` that is its."""
    yield where, scheduler, state
    for index, (inner, inner_state) in enumerate(
        zip(inner_schedulers(scheduler), state.get("_schedulers", ()), strict=True)
    ):
        place = f"schedulers {index} ({type(inner).__name__})"
        yield from walk(inner, inner_state, f"{where} {place}" if where else place)


def changed(where: str, scheduler: LRScheduler, state: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of one scheduler that are otherwise in `state`."""
    attributes = vars(scheduler)
    found = []
    for key, name in setting_attributes(scheduler).items():
        mine, theirs = _shown(attributes[name]), _shown(state.get(name))
        if theirs is not None and mine != theirs:
            found.append(Setting(key, theirs, mine, where=where, is_horizon=key in HORIZONS))
    # Phases are parts of the whole: if that has another length, so have they.
    is_longer = any(setting.key == "total_steps" for setting in found)
    return [setting for setting in found if setting.key != "phases" or not is_longer]


def listed(where: str, scheduler: LRScheduler) -> list[Setting]:
    """Return the settings of one scheduler that a script can override."""
    attributes = vars(scheduler)
    return [
        Setting(key, None, _shown(attributes[name]), where=where)
        for key, name in setting_attributes(scheduler).items()
        if key not in HORIZONS
    ]


def added(
    live: Mapping[str, Any], saved: Mapping[str, Any], where: str = "", path: str = "state"
) -> list[Setting]:
    """Return a line for each attribute that only the live scheduler has; both are states, saved at `path`."""
    found = []
    for name in sorted(live.keys() - saved.keys()):
        note = f"{where} {name}: as the script built it, the checkpoint lacks it".strip()
        found.append(Setting(name, None, "as it is", where=where, note=note, places=(join(path, name),)))
    pairs = zip(live.get("_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    for index, (mine, theirs) in enumerate(pairs):
        found += added(mine, theirs, f"{where} schedulers {index}".strip(), f"{path}/_schedulers/{index}")
    return found


def follow(scheduler: Any, index: int, base: float, present: float) -> None:
    """Let a scheduler reckon with another base rate of the group at `index`."""
    for rates, rate in ((getattr(scheduler, "base_lrs", []), base), (scheduler._last_lr, present)):
        if index < len(rates):
            rates[index] = placed(rate, rates[index])


def _shown(value: Any) -> Any:
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [phase["end_step"] for phase in value]
    return plain(value)
