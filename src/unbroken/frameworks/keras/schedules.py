"""Learning-rate schedules: functions of the count of steps, so that there are only settings to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from unbroken.errors import UsageError
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.plain import plain_items
from unbroken.frameworks.keras.tensors import number_of
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
    """Return the settings of `schedule` and, with dotted names, of those inside, and their classes."""
    held = {key.lstrip("_"): item for key, item in vars(schedule).items()}
    try:
        config = schedule.get_config()
    except NotImplementedError:
        config = {key: item for key, item in vars(schedule).items() if not key.startswith("_")}
    found = {key: item for key, item in plain_items(_plain_numbers(config)).items() if key != "name"}
    seen: set[int] = set()
    for key, item in (*held.items(), *config.items()):
        if is_schedule(item) and id(item) not in seen:
            seen.add(id(item))
            found[f"{key}.{_CLASS}"] = class_name(item)
            found |= {f"{key}.{below}": setting for below, setting in _settings_of(item).items()}
    return found


def _plain_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: number_of(item) if _is_number(item) else item for key, item in config.items()}


def _is_number(item: Any) -> bool:
    # One of NumPy or of the framework below.
    return getattr(item, "shape", None) == () and not isinstance(item, bool | int | float | str)


def schedule_differences(schedule: Any, saved: Mapping[str, Any], name: str = "") -> list[Difference]:
    """Return why `schedule` cannot go on as the `saved` one did."""
    found = class_differences(schedule, saved[_CLASS], name)
    if found:
        return found
    mine = _settings_of(schedule)
    texts = (_why_not(schedule, key, mine, item) for key, item in saved.items() if key != _CLASS)
    return [Difference("other", name, text) for text in texts if text]


def _why_not(schedule: Any, key: str, mine: Mapping[str, Any], saved: Any) -> str:
    """Return why `schedule`, whose settings are `mine`, cannot have its setting `key` as it was saved."""
    if key not in mine:
        return f"the setting {key} ({saved!r}) of the schedule is gone"
    if mine[key] == saved:
        return ""
    if key.endswith(f".{_CLASS}"):
        inside = key.removesuffix(f".{_CLASS}")
        return f"a {mine[key]} as {inside} of the schedule, the checkpoint has a {saved}"
    if owner_of(schedule, key) is not None:
        return ""
    return (
        f"the setting {key} of the schedule is {mine[key]!r}, in the checkpoint {saved!r}, and no attribute "
        "of this name is there to put it back: override= with learning_rate takes the script's schedule"
    )


def _is_horizon(key: str) -> bool:
    return key.rpartition(".")[2] in _HORIZONS


def schedule_settings(schedule: Any, saved: Mapping[str, Any], where: str = "") -> list[Setting]:
    """Return the settings of `schedule` that are not as in the `saved` one."""
    return [
        Setting(key, saved[key], item, where=where, is_horizon=_is_horizon(key))
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
    """Set what the configuration of `owner` calls `key`; a dotted one is a setting of what it holds.

    Raises UsageError where nothing there is called that.
    """
    found = owner_of(owner, key)
    if found is None:
        raise UsageError(
            f"{class_name(owner)}: expected an attribute for its setting {key}, found none",
            hint="keep each argument in an attribute of the same name",
        )
    setattr(*found, item)


def owner_of(owner: Any, key: str) -> tuple[Any, str] | None:
    """Return what holds the setting `key` in or below `owner`, and the attribute there."""
    first, _, below = key.partition(".")
    attribute = next((name for name in (first, f"_{first}") if hasattr(owner, name)), None)
    if attribute is None or not below:
        return None if attribute is None else (owner, attribute)
    return owner_of(getattr(owner, attribute), below)


def with_horizon(schedule: Any, how: Horizon) -> Callable[[], None]:
    """Look at a schedule as the script built it; return what puts `how`, 'keep' or 'stretch', in force."""
    script = {key: item for key, item in _settings_of(schedule).items() if _is_horizon(key)}

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
