"""The random generators of the whole process: a part that every run has without asking."""

from __future__ import annotations

from typing import Any

from unbroken.frameworks.rng import capture_global_rng, restore_global_rng, rng_differences
from unbroken.state.handlers import Difference, Setting

RNG_PART = "rng"


class GlobalRandomness:
    """Stands for the generators of Python, NumPy and the frameworks that are loaded."""


class GlobalRandomnessHandler:
    """Captures and restores all of them; restored last, since building things draws."""

    name = "process.rng"
    order = 100

    def accepts(self, value: object) -> bool:
        return isinstance(value, GlobalRandomness)

    def state(self, value: Any) -> object:
        return capture_global_rng()

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return [Difference("other", "", text) for text in rng_differences(state)]

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        new = sorted(set(capture_global_rng()) - set(state))
        return [
            Setting(
                name,
                None,
                "as it is",
                note=f"the generator of {name} came into use since and begins as it is",
            )
            for name in new
        ]

    def restore(self, value: Any, state: Any) -> None:
        restore_global_rng(state)
