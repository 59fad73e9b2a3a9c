"""Which optimizers and schedulers train the parts of a run without being parts themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from unbroken.frameworks.torch.class_names import class_name
from unbroken.frameworks.torch.modules import parameter_names

# So deep are objects looked into for one that they hold: themselves, and containers in them.
_DEPTH = 3


class AtWork:
    """Notes every optimizer that takes a step, until it is closed. `parts` may still grow."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_stepped = False
        self.has_news = False
        self._hook = register_optimizer_step_post_hook(self._note)

    def take_stepped(self) -> bool:
        """Return whether an optimizer has taken a step since this was asked last.

        True as long as none has ever been seen: then nobody knows when a step is complete but the script.
        """
        stepped, self._has_stepped = self._has_stepped or not self._seen, False
        return stepped

    def lost(self) -> list[tuple[str, bool]]:
        """Return a line for each optimizer with a state, and each scheduler, that is no part.

        With each whether it is certain that no checkpoint will hold it: a part that has it inside may keep
        its state in a way of its own.
        """
        self.has_news = False
        names = parameter_names(self._parts)
        found = []
        for optimizer in self._seen:
            trained = [names[id(item)] for item in _parameters(optimizer) if id(item) in names]
            if trained and not self._is_part(optimizer) and any(optimizer.state.values()):
                more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
                text = f"the state of a {class_name(optimizer)} that trains {trained[0]}{more}"
                found.append((text, not self._is_inside_a_part(optimizer)))
        return found + self._schedules()

    def close(self) -> None:
        """Note no more."""
        self._hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_stepped = True
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self.has_news = True

    def _schedules(self) -> list[tuple[str, bool]]:
        schedulers = [value for value in self._parts.values() if isinstance(value, LRScheduler)]
        scheduled = {id(scheduler.optimizer) for scheduler in schedulers}
        return [
            (f"{part}: a learning rate scheduler of it", not self._holds_scheduler())
            for part, value in self._parts.items()
            # Schedulers put a counter around the step of their optimizer, and leave this mark.
            if isinstance(value, torch.optim.Optimizer)
            and hasattr(value.step, "_wrapped_by_lr_sched")
            and id(value) not in scheduled
        ]

    def _is_part(self, optimizer: object) -> bool:
        return any(value is optimizer for value in self._parts.values())

    def _is_inside_a_part(self, sought: object) -> bool:
        return any(item is sought for value in self._parts.values() for item in _held(value))

    def _holds_scheduler(self) -> bool:
        return any(
            isinstance(item, LRScheduler) and item is not value
            for value in self._parts.values()
            for item in _held(value)
        )


def _held(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield `value` and what its attributes and the containers in them hold, tensors and modules aside."""
    yield value
    if not depth or isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer | str | bytes):
        return
    inner: Any = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    for item in (*inner, *getattr(value, "__dict__", {}).values()):
        yield from _held(item, depth - 1)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
