"""Which optimizers and schedulers train the parts of a run without being parts themselves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from unbroken.frameworks.torch.modules import parameter_names


class AtWork:
    """Notes every optimizer that takes a step, until it is closed. `parts` may still grow."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_post_hook(self._note)

    def lost(self) -> list[str]:
        """Return a line for each optimizer with a state, and each scheduler, that no checkpoint will hold."""
        names = parameter_names(self._parts)
        parts = {id(value) for value in self._parts.values()}
        found = []
        for optimizer in self._seen:
            trained = [names[id(item)] for item in _parameters(optimizer) if id(item) in names]
            if trained and id(optimizer) not in parts and any(optimizer.state.values()):
                more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
                found.append(f"the state of a {_class(optimizer)} that trains {trained[0]}{more}")
        return found + self._schedules()

    def close(self) -> None:
        """Note no more."""
        self._hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._seen.add(optimizer)

    def _schedules(self) -> list[str]:
        if any(isinstance(value, LRScheduler) for value in self._parts.values()):
            return []
        return [
            f"{part}: a learning rate scheduler of it"
            for part, value in self._parts.items()
            # Schedulers put a counter around the step of their optimizer, and leave this mark.
            if isinstance(value, torch.optim.Optimizer) and hasattr(value.step, "_wrapped_by_lr_sched")
        ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
