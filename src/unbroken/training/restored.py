"""What a restore did, as values."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.state.handlers import Setting
from unbroken.training.comparison import PartReport


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A setting that checkpoint and script disagree about, and which of the two decided it."""

    part: str
    setting: Setting
    script_wins: bool

    def __str__(self) -> str:
        return f"{self.part}: {self.setting.text(script_wins=self.script_wins)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did: a report on each part, the settings in question, the learning rates.

    `learning_rates` are those in force now, `script_learning_rates` those that the script had set.
    With `inside_step` the gradients of a step that was not complete were restored, too. `idle` are the
    patterns of `override` that stand for nothing.
    """

    parts: dict[str, PartReport]
    settings: tuple[SettingInForce, ...]
    learning_rates: tuple[float, ...]
    script_learning_rates: tuple[float, ...]
    inside_step: bool
    idle: tuple[str, ...]

    @property
    def overridden(self) -> dict[str, str]:
        """The settings of the script that are in force, as they are noted in checkpoints."""
        won = {
            noted_name(found.part, found.setting): repr(found.setting.script)
            for found in self.settings
            if found.script_wins and not found.setting.is_horizon
        }
        # These are told once.
        return {**won, **dict.fromkeys(self.idle, "")}


def noted_name(part: str, setting: Setting) -> str:
    """Return the name under which checkpoints note that `setting` was overridden."""
    return ".".join(filter(None, (part, setting.where, setting.key)))
