"""The learning rates of the optimizers among the parts, as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def optimizers_of(parts: Mapping[str, object]) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers among the parts by name, each once; of one that wraps another, the inner one.

    Hooks and groups of a wrapper may not be those that count.
    """
    seen: set[int] = set()
    for name, value in parts.items():
        inner = getattr(value, "optimizer", None)
        found = inner if isinstance(inner, Optimizer) else value
        if isinstance(found, Optimizer) and id(found) not in seen:
            seen.add(id(found))
            yield name, found


def unknown_optimizers(parts: Mapping[str, object]) -> list[str]:
    """Return the names of the parts that have groups with learning rates and are no optimizer of torch."""
    return [
        name
        for name, value in parts.items()
        if not isinstance(value, Optimizer)
        and not isinstance(getattr(value, "optimizer", None), Optimizer)
        and isinstance(getattr(value, "param_groups", None), list)
    ]


def has_scaler(parts: Mapping[str, object]) -> bool:
    """Tell whether a gradient scaler is at work, which leaves out steps whose gradients overflow."""
    return any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in parts.values())


class HighestRate:
    """Returns, when it is called, the highest learning rate of all groups; `parts` may still grow.

    None if there is none, or if one is a tensor on a device: to read that, training would have to wait.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._optimizers: list[Optimizer] = []
        self._looked_at = -1

    def __call__(self) -> float | None:
        if len(self._parts) != self._looked_at:
            self._optimizers = [optimizer for _, optimizer in optimizers_of(self._parts)]
            self._looked_at = len(self._parts)
        highest: float | None = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate: Any = group.get("lr")
                if type(rate) is not float:
                    if rate is None or (isinstance(rate, torch.Tensor) and rate.device.type != "cpu"):
                        return None
                    rate = float(rate)
                if highest is None or rate > highest:
                    highest = rate
        return highest
