"""Looks on as optimizers are about to use gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unbroken.frameworks.torch.gradients import gradients


class GradientWatch:
    """Calls `about_to_step` with the gradients of an optimizer before each step of it, until it is closed."""

    def __init__(self, about_to_step: Callable[[dict[str, Any]], None]) -> None:
        self._about_to_step = about_to_step
        self._hook = register_optimizer_step_pre_hook(self._note)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        named = [
            (f"{group_index}.{index}", parameter)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]
        self._about_to_step(gradients(named))
