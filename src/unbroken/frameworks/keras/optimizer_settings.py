"""The settings of an optimizer: those of its configuration, and its learning rate.

As for every optimizer here, those of the checkpoint are put in force, and what the script sets otherwise is
reported. What decides which variables there are is the script's: where that differs, the variables do, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from unbroken.frameworks.keras.class_names import class_name
from unbroken.frameworks.keras.plain import plain_items
from unbroken.frameworks.keras.schedules import (
    HeldRate,
    is_schedule,
    owner_of,
    put_attribute,
    put_schedule,
    schedule_differences,
    schedule_settings,
    schedule_state,
    script_schedule_settings,
    with_horizon,
)
from unbroken.frameworks.keras.slots import wraps_others
from unbroken.frameworks.keras.tensors import number_of
from unbroken.state.handlers import Difference, Horizon, Setting
from unbroken.state.tree import join

RATE, FIRST_RATE, SCHEDULE, CLASS = "learning_rate", "initial_learning_rate", "schedule", "class"
_HELD_CLASS = "HeldRate"
# What they decide shows in the variables that an optimizer makes, or is a name.
_OF_SCRIPT = frozenset({"use_ema", "gradient_accumulation_steps", "amsgrad", "centered", "name"})
# Which of the trained variables do not decay: told to the optimizer before it is built.
EXCLUDED = "without_weight_decay"


class FirstRates:
    """The learning rates that scripts built optimizers with: what moves since is no change of the script."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[object, float]] = {}

    def of(self, optimizer: Any) -> float:
        """Return the rate that `optimizer` had when this was asked first."""
        known = self._rates.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            known = self._rates[id(optimizer)] = (optimizer, number_of(optimizer._learning_rate))
        return known[1]

    def put(self, optimizer: Any, rate: float) -> None:
        """Note that `rate` is what the script set."""
        self._rates[id(optimizer)] = (optimizer, rate)


def options_of(optimizer: Any, first: FirstRates) -> dict[str, Any]:
    """Return the settings of one optimizer as plain values, without those of others that it wraps."""
    found = {key: item for key, item in plain_items(optimizer.get_config()).items() if key != "name"}
    found.pop(RATE, None)
    if wraps_others(optimizer):
        return found
    rate = optimizer._learning_rate
    if is_schedule(rate):
        found[SCHEDULE] = schedule_state(rate)
        found[RATE] = number_of(rate(optimizer._iterations))
    elif isinstance(rate, keras.Variable):
        found[RATE] = number_of(rate)
        found[FIRST_RATE] = first.of(optimizer)
    return found


def present_rate(optimizer: Any) -> float | None:
    """Return the learning rate of now, of one that wraps no others; None where a function makes it."""
    rate = optimizer._learning_rate
    if is_schedule(rate):
        return number_of(rate(optimizer._iterations))
    return number_of(rate) if isinstance(rate, keras.Variable) else None


def rate_differences(optimizer: Any, saved: Mapping[str, Any], where: str) -> list[Difference]:
    """Return why the learning rate of `optimizer` cannot be what it was."""
    schedule = saved.get(SCHEDULE)
    rate = getattr(optimizer, "_learning_rate", None)
    if wraps_others(optimizer) or is_held(saved):
        return []
    mine, theirs = _kind(rate), schedule[CLASS] if schedule else "number" if RATE in saved else "function"
    if mine != theirs:
        text = f"a {mine} as {RATE}, the checkpoint has a {theirs}: override= with {RATE} takes the script's"
        return [Difference("other", where, text)]
    return schedule_differences(rate, schedule, where) if schedule else []


def _kind(rate: object) -> str:
    if is_schedule(rate):
        return class_name(rate)
    return "number" if isinstance(rate, keras.Variable) else "function"


def is_held(options: Mapping[str, Any]) -> bool:
    """Tell whether the rate in the saved `options` is one that was held where a schedule was."""
    schedule = options.get(SCHEDULE)
    return schedule is not None and schedule[CLASS] == _HELD_CLASS


def option_differences(optimizer: Any, saved: Mapping[str, Any], where: str) -> list[Difference]:
    """Return which of the `saved` settings `optimizer` has no attribute for, to put them into."""
    return [
        Difference(
            "other", where, f"the setting {key} is {item!r} in the checkpoint, and no attribute is called so"
        )
        for key, item in _settable(optimizer, saved)
        if owner_of(optimizer, key) is None
    ]


def put_options(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Put the `saved` settings into `optimizer`, but for its learning rate."""
    for key, item in _settable(optimizer, saved):
        put_attribute(optimizer, key, item)


def put_rate(optimizer: Any, saved: Mapping[str, Any], first: FirstRates) -> None:
    """Put the learning rate of the `saved` settings into `optimizer`."""
    if RATE not in saved or wraps_others(optimizer):
        return
    schedule, rate = saved.get(SCHEDULE), optimizer._learning_rate
    if is_held(saved):
        optimizer.learning_rate = HeldRate(saved[SCHEDULE]["held"])
    elif schedule is not None and is_schedule(rate):
        put_schedule(rate, schedule)
    elif schedule is None and isinstance(rate, keras.Variable):
        optimizer.learning_rate = saved[RATE]
        first.put(optimizer, saved.get(FIRST_RATE, saved[RATE]))


def _settable(optimizer: Any, saved: Mapping[str, Any]) -> list[tuple[str, Any]]:
    mine = plain_items(optimizer.get_config())
    return [
        (key, item)
        for key, item in saved.items()
        if key in mine and key not in _OF_SCRIPT and key != RATE and mine[key] != item
    ]


def changed_options(
    optimizer: Any,
    mine: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    place: str,
    *,
    is_same: bool,
    keeps_rate: bool,
) -> Iterator[Setting]:
    """Yield which of `mine`, the settings of `optimizer`, are not as `saved`, which stand at `place`.

    Unless it `is_same`, keeping the same variables, those of the script stay in force; where it
    `keeps_rate`, the script's learning rate does.
    """
    for key in dict.fromkeys((*mine, *saved)):
        theirs, item = saved.get(key), mine.get(key)
        if key in (RATE, FIRST_RATE, SCHEDULE) or (key in saved and key in mine and theirs == item):
            continue
        setting = Setting(key, theirs, item, where=where)
        if is_same and key in saved and key in mine and key not in (*_OF_SCRIPT, EXCLUDED):
            yield setting
        else:
            note = setting.text(script_wins=True)
            yield Setting(key, theirs, item, where=where, note=note, places=(join(place, key),))
    if keeps_rate:
        theirs = f"holds it at {saved[RATE]!r}" if is_held(saved) else "has another kind of it"
        note = f"{RATE}: that of the script is used, the checkpoint {theirs}"
        yield Setting(RATE, saved.get(RATE), mine.get(RATE), where=where, note=note, places=(place,))
    else:
        yield from _changed_rate(optimizer, mine, saved, where, place)


def _changed_rate(
    optimizer: Any, mine: Mapping[str, Any], saved: Mapping[str, Any], where: str, place: str
) -> Iterator[Setting]:
    schedule = saved.get(SCHEDULE)
    if is_held(saved):
        if not is_held(mine):
            note = (
                f"{RATE}: held at {saved[RATE]!r}, the script has a {_kind(optimizer._learning_rate)}, which "
                f"override= with {RATE} takes"
            )
            yield Setting(RATE, saved[RATE], mine.get(RATE), where=where, note=note)
    elif (schedule is None) != (SCHEDULE not in mine) or (RATE in saved) != (RATE in mine):
        note = f"{RATE}: that of the script is used, the checkpoint has another kind of it"
        places = (place,)
        yield Setting(RATE, saved.get(RATE), mine.get(RATE), where=where, note=note, places=places)
    elif schedule is not None:
        if schedule[CLASS] != mine[SCHEDULE][CLASS]:
            note = f"{RATE}: that of the script is used, the checkpoint has a {schedule[CLASS]}"
            yield Setting(RATE, saved[RATE], mine[RATE], where=where, note=note, places=(place,))
        else:
            yield from schedule_settings(optimizer._learning_rate, schedule, where)
    elif RATE in mine and saved[RATE] != mine[RATE]:
        moves = saved.get(FIRST_RATE) == mine[RATE]
        yield Setting(RATE, saved[RATE], mine[RATE], where=where, moves=moves)


def script_options(optimizer: Any, where: str, first: FirstRates) -> Iterator[Setting]:
    """Yield all settings of `optimizer`, as the script built it."""
    for key, item in options_of(optimizer, first).items():
        if key == SCHEDULE:
            yield from script_schedule_settings(optimizer._learning_rate, where)
        elif key != FIRST_RATE and not (key == RATE and is_schedule(optimizer._learning_rate)):
            yield Setting(key, None, item, where=where)


def override_options(optimizer: Any, settings: Sequence[Setting], first: FirstRates) -> None:
    """Put `settings` of the script in force on `optimizer`."""
    rate = getattr(optimizer, "_learning_rate", None)
    for setting in settings:
        if setting.note:
            # In force already.
            continue
        if setting.key == RATE:
            optimizer.learning_rate = setting.script
            first.put(optimizer, float(setting.script))  # type: ignore[arg-type]
        elif is_schedule(rate) and setting.key in schedule_state(rate):
            put_attribute(rate, setting.key, setting.script)
        else:
            put_attribute(optimizer, setting.key, setting.script)


def with_rate_horizon(optimizer: Any, how: Horizon) -> Callable[[], None]:
    """Look at the schedule of `optimizer` as the script built it; return what puts `how` in force."""
    rate = optimizer._learning_rate
    if not is_schedule(rate):
        return lambda: None
    if how != "hold":
        return with_horizon(rate, how)

    def hold() -> None:
        if not isinstance(optimizer._learning_rate, HeldRate):
            optimizer.learning_rate = HeldRate(number_of(rate(optimizer._iterations)))

    return hold
