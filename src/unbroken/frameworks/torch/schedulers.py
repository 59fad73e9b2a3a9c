"""Learning-rate schedulers: their state, never a re-computation from the step."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from unbroken.frameworks.torch.optimizers import class_name
from unbroken.state.handlers import ORDER_SCHEDULER, Difference, Setting


class SchedulerHandler:
    """`torch.optim.lr_scheduler.LRScheduler`, restored before the optimizer, whose rate must win."""

    name = "torch.scheduler"
    order = ORDER_SCHEDULER

    def accepts(self, value: object) -> bool:
        return isinstance(value, LRScheduler)

    def state(self, value: Any) -> object:
        return {"class": class_name(value), "state": value.state_dict()}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        mine, theirs = class_name(value), state["class"]
        if mine == theirs:
            return []
        return [Difference("other", "", f"class {mine}, the checkpoint has class {theirs}")]

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state["state"])

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        # What the constructor takes is a setting; the rest of the state moves with training.
        settings = inspect.signature(type(value).__init__).parameters
        live, saved = value.state_dict(), state["state"]
        return [
            Setting(name, saved[name], live[name])
            for name in settings
            if name in live and name in saved and name not in _MOVING and live[name] != saved[name]
        ]


# Constructor arguments that a scheduler counts on with.
_MOVING = {"last_epoch"}
