"""A scheduler and its optimizer of which only one was restored: both have to go by one rate.

The rate that a schedule starts from is a setting of the optimizer, where it has got to is the scheduler's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from unbroken.frameworks.torch.param_groups import (
    OF_SCHEDULERS,
    base_rate,
    group_name,
    plain,
    put_base_rate,
    put_option,
)
from unbroken.frameworks.torch.schedule_settings import follow, inner_schedulers
from unbroken.state.handlers import Setting

# Some schedulers move these as well; their groups have a `max_momentum`.
_MOMENTA = frozenset({"momentum", "betas"})


def settle(
    scheduler: Any, parts: Mapping[str, object], restored: Collection[str]
) -> Callable[[], list[tuple[str, Setting]]]:
    """Look at `scheduler` as the script built it; return what settles its rates once `restored` parts are."""
    optimizer = _name_in(parts, scheduler.optimizer)
    if optimizer is None or (_name_in(parts, scheduler) in restored) == (optimizer in restored):
        return list
    act = _place_in_schedule(scheduler) if optimizer not in restored else _begin(scheduler, parts, restored)
    return lambda: [(optimizer, setting) for setting in act()]


def _name_in(parts: Mapping[str, object], value: object) -> str | None:
    return next((name for name, part in parts.items() if part is value), None)


def _place_in_schedule(scheduler: Any) -> Callable[[], list[Setting]]:
    """Return what gives an optimizer that begins anew the rates that its restored schedule has come to."""
    built = [(plain(group["lr"]), base_rate(group)) for group in scheduler.optimizer.param_groups]

    def place() -> list[Setting]:
        found = []
        rates = _rates_of(scheduler)
        for index, (group, (rate, base)) in enumerate(
            zip(scheduler.optimizer.param_groups, built, strict=True)
        ):
            if index >= len(rates):
                continue
            present = _rate_for(scheduler, index, base, rates[index], rate)
            put_base_rate(group, base, present)
            if present != rates[index]:
                for one in _all_of(scheduler):
                    follow(one, index, base, present)
            if present != rate or present != rates[index]:
                where = group_name(index)
                note = (
                    f"{where} lr: {present!r}, from {base!r} of the script and as far as the schedule is; "
                    f"the script sets {rate!r}, the schedule had come to {rates[index]!r}"
                )
                found.append(Setting("lr", rates[index], present, where=where, note=note))
        return found

    return place


def _rates_of(scheduler: Any) -> list[float]:
    if not isinstance(scheduler, OneCycleLR | CyclicLR):
        return [plain(rate) for rate in scheduler._last_lr]
    with warnings.catch_warnings():
        # Asked outside of a step, which torch would remark upon. It also puts the momentum in its place.
        warnings.simplefilter("ignore")
        return [plain(rate) for rate in scheduler.get_lr()]


def _rate_for(scheduler: Any, index: int, base: float, rate: float, built: float) -> float:
    """Return the present rate, the schedule having come to `rate`, if it starts from `base`."""
    if isinstance(scheduler, OneCycleLR | CyclicLR):
        # Their rates are all of their own settings.
        return rate
    old = _base_of(scheduler, index)
    if old is None or not old:
        # It only reduces what it finds.
        return built
    return rate if base == old else rate * (base / old)


def _base_of(scheduler: Any, index: int) -> float | None:
    for one in _all_of(scheduler):
        bases = getattr(one, "base_lrs", ())
        if index < len(bases):
            return float(plain(bases[index]))
    return None


def _all_of(scheduler: Any) -> Iterator[LRScheduler]:
    yield scheduler
    for inner in inner_schedulers(scheduler):
        yield from _all_of(inner)


def _begin(
    scheduler: Any, parts: Mapping[str, object], restored: Collection[str]
) -> Callable[[], list[Setting]]:
    """Return what gives a restored optimizer the rates with which its schedule begins anew."""
    groups = scheduler.optimizer.param_groups
    built = [{key: plain(item) for key, item in group.items() if key in _MOVED} for group in groups]
    is_alone = not any(
        isinstance(part, LRScheduler) and part.optimizer is scheduler.optimizer and name in restored
        for name, part in parts.items()
    )

    def begin() -> list[Setting]:
        if isinstance(scheduler, ReduceLROnPlateau) or not is_alone:
            # It goes on from the rates that it finds.
            scheduler._last_lr = [plain(group["lr"]) for group in scheduler.optimizer.param_groups]
            return []
        found = []
        for index, (group, options) in enumerate(zip(scheduler.optimizer.param_groups, built, strict=False)):
            found += _put(group, options, group_name(index))
        return found

    return begin


_MOVED = OF_SCHEDULERS | _MOMENTA | {"lr"}


def _put(group: dict[str, Any], built: Mapping[str, Any], where: str) -> list[Setting]:
    """Put into a group what schedulers move there, as the script built it; return what that changed."""
    moves_momentum = "max_momentum" in group or "max_momentum" in built
    for key in OF_SCHEDULERS - built.keys():
        # Of another schedule.
        group.pop(key, None)
    found = []
    for key, item in built.items():
        before = plain(group.get(key))
        if before == item or (key in _MOMENTA and not moves_momentum):
            continue
        put_option(group, key, item)
        note = f"{where} {key}: {item!r}, as the schedule begins anew; the checkpoint has {before!r}"
        found.append(Setting(key, before, item, where=where, note=note))
    return found
