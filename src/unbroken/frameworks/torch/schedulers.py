"""Learning-rate schedulers: their state, never a re-computation from the step."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from unbroken.frameworks.torch.optimizers import class_name
from unbroken.state.handlers import ORDER_SCHEDULER


class SchedulerHandler:
    """`torch.optim.lr_scheduler.LRScheduler`, restored before the optimizer, whose rate must win."""

    name = "torch.scheduler"
    order = ORDER_SCHEDULER

    def accepts(self, value: object) -> bool:
        return isinstance(value, LRScheduler)

    def state(self, value: Any) -> object:
        return {"class": class_name(value), "state": value.state_dict()}

    def differences(self, value: Any, state: Any) -> list[str]:
        mine, theirs = class_name(value), state["class"]
        return [] if mine == theirs else [f"class {mine}, the checkpoint has class {theirs}"]

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state["state"])
