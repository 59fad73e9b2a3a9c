"""Schedulers: the learning rates after a resume are those of the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from .runs import restore, save

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=8),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=9),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def trace(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates += [float(group["lr"]).hex() for group in optimizer.param_groups]
    return rates


@pytest.mark.parametrize("order", ["scheduler first", "optimizer first"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_gives_the_same_learning_rates(tmp_path: Path, name: str, order: str) -> None:
    def build() -> tuple[Any, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        parts = {"scheduler": scheduler, "optimizer": optimizer}
        if order == "optimizer first":
            parts = dict(reversed(parts.items()))
        return optimizer, scheduler, {"model": model, **parts}

    optimizer, scheduler, parts = build()
    trace(scheduler, optimizer, 6)
    save(tmp_path, **parts)
    expected = trace(scheduler, optimizer, 10)
    optimizer, scheduler, parts = build()
    restore(tmp_path, **parts)
    assert trace(scheduler, optimizer, 10) == expected
