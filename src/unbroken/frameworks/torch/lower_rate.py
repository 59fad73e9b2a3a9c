"""Learning rates that are lower while an optimizer steps, and at no other time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer


class LowerRates:
    """Multiplies the rates of `optimizers` by `factor()` inside their `step`, until it is closed.

    They are put back exactly before `step` returns or raises: schedulers, checkpoints and the script never
    see them.
    """

    def __init__(self, optimizers: Iterable[Optimizer], factor: Callable[[], float]) -> None:
        self._factor = factor
        self._is_closed = False
        self._steps = [(optimizer, self._wrap(optimizer)) for optimizer in optimizers]

    def refresh(self) -> None:
        """Do nothing: each step asks for its factor itself."""

    def close(self) -> None:
        """Lower no more."""
        self._is_closed = True
        for optimizer, (own, before) in self._steps:
            # A scheduler that was made since has wrapped it once more, and stays.
            if vars(optimizer).get("step") is own:
                del optimizer.step
                vars(optimizer).update(before)
        self._steps.clear()

    def _wrap(self, optimizer: Optimizer) -> tuple[MethodType, dict[str, Any]]:
        """Put our own `step` into the optimizer; return it, and what stood there before.

        The hooks of torch are no way to do it: those after a step are not called when it raises.
        """
        step: Any = optimizer.step
        before = {name: value for name, value in vars(optimizer).items() if name == "step"}

        @functools.wraps(getattr(step, "__func__", step))
        def lower(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            factor = 1.0 if self._is_closed else self._factor()
            with _times(optimizer, factor):
                return step(*args, **kwargs)

        # Schedulers expect a bound method here.
        own = MethodType(lower, optimizer)
        vars(optimizer)["step"] = own
        return own, before


@contextmanager
def _times(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the rates by `factor` inside this block."""
    if factor == 1:
        yield
        return
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    numbers = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            # In place: a captured graph reads this very tensor, which groups may share.
            tensors.setdefault(id(rate), (rate, rate.detach().clone()))
        elif rate is not None:
            group["lr"] = lowered = rate * factor
            numbers.append((group, rate, lowered))
    try:
        with torch.no_grad():
            for rate, _ in tensors.values():
                rate.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for rate, own in tensors.values():
                rate.copy_(own)
        for group, rate, lowered in numbers:
            # Some optimizers find their rates themselves, in their steps.
            if group.get("lr") is lowered:
                group["lr"] = rate
