"""Learning-rate schedules: functions of the count of steps, so that there are only settings to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from unbroken.errors import UsageError
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.plain import plain_items
from unbroken.state.handlers import ORDER_SCHEDULER, Difference, Horizon, Setting

# What says how long a schedule is.
_HORIZONS = frozenset({"decay_steps", "first_decay_steps", "warmup_steps"})
_HELD = "held"
_CLASS = "class"


class ScheduleHandler:
    """`keras.optimizers.schedules.LearningRateSchedule`: the settings in the checkpoint are put in force."""

    name = "keras.schedule"
    order = ORDER_SCHEDULER

    def accepts(self, value: object) -> bool:
        return is_schedule(value)

    def state(self, value: Any) -> object:
        return schedule_state(value)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return schedule_differences(value, state)

    def restore(self, value: Any, state: Any) -> None:
        put_schedule(value, state)

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        return schedule_settings(value, state)

    def script_settings(self, value: Any) -> list[Setting]:
        return script_schedule_settings(value)

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        for setting in settings:
            put_attribute(value, setting.key, setting.script)

    def with_horizon(self, value: Any, state: Any, how: Horizon) -> Callable[[], None]:
        if how == "hold":
            raise UsageError(
                "horizon='hold': a schedule that is a part by itself does not know the present rate",
                hint="pass its optimizer as the part, or choose 'keep' or 'stretch'",
            )
        return with_horizon(value, how)


def is_schedule(value: object) -> bool:
    """Tell whether `value` is a schedule that Keras, or the user, has a class for."""
    return isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


def schedule_state(schedule: Any) -> dict[str, Any]:
    """Return the class of a schedule and its settings, as plain values."""
    return {_CLASS: class_name(schedule), **_settings_of(schedule)}


def _settings_of(schedule: Any) -> dict[str, Any]:
    try:
        config = schedule.get_config()
    except NotImplementedError:
        config = {key: item for key, item in vars(schedule).items() if not key.startswith("_")}
    return {key: item for key, item in plain_items(config).items() if key != "name"}


def schedule_differences(schedule: Any, saved: Mapping[str, Any], name: str = "") -> list[Difference]:
    """Return why `schedule` cannot go on as the `saved` one did."""
    found = class_differences(schedule, saved[_CLASS], name)
    if not found:
        mine = _settings_of(schedule)
        found = [
            Difference("other", name, f"the setting {key} ({item!r}) of the schedule is gone")
            for key, item in saved.items()
            if key != _CLASS and key not in mine
        ]
    return found


def schedule_settings(schedule: Any, saved: Mapping[str, Any], where: str = "") -> list[Setting]:
    """Return the settings of `schedule` that are not as in the `saved` one."""
    return [
        Setting(key, saved[key], item, where=where, is_horizon=key in _HORIZONS)
        for key, item in _settings_of(schedule).items()
        if key in saved and saved[key] != item
    ]


def script_schedule_settings(schedule: Any, where: str = "") -> list[Setting]:
    """Return all settings of `schedule`, as the script set them."""
    return [Setting(key, None, item, where=where) for key, item in _settings_of(schedule).items()]


def put_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Give `schedule` the settings of the `saved` one."""
    for key, item in _settings_of(schedule).items():
        if key in saved and saved[key] != item:
            put_attribute(schedule, key, saved[key])


def put_attribute(owner: Any, key: str, item: Any) -> None:
    """Set what the configuration of `owner` calls `key`."""
    setattr(owner, key if hasattr(owner, key) else f"_{key}", item)


def with_horizon(schedule: Any, how: Horizon) -> Callable[[], None]:
    """Look at a schedule as the script built it; return what puts `how`, 'keep' or 'stretch', in force."""
    script = {key: item for key, item in _settings_of(schedule).items() if key in _HORIZONS}

    def put() -> None:
        if how == "stretch":
            for key, item in script.items():
                put_attribute(schedule, key, item)

    return put


class HeldRate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A rate that stays, where a schedule was."""

    def __init__(self, held: float) -> None:
        self.held = held

    def __call__(self, step: Any) -> Any:
        """Return the rate that was held."""
        return keras.ops.convert_to_tensor(self.held, dtype=keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Return that rate."""
        return {_HELD: self.held}
