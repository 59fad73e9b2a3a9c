"""A small real training: it may crash at a step, and one of its batches may be poisoned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import unbroken

STEPS_PER_EPOCH = 8


class CrashError(Exception):
    """What ends an attempt."""


def train(
    directory: Path,
    *,
    epochs: int = 3,
    crash_at: int | None = None,
    poison_at: int | None = None,
    each_step: Callable[[unbroken.Run, float], None] = lambda run, loss: None,
) -> None:
    """Train as one attempt; the batch that first makes step `poison_at` is poisoned from then on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.arange(2 * STEPS_PER_EPOCH)
    loader = DataLoader(TensorDataset(torch.randn(len(samples), 4), samples), batch_size=2, shuffle=True)
    poisoned: list[int] = []
    with unbroken.Run(
        directory,
        model=model,
        optimizer=optimizer,
        save=[unbroken.EverySteps(4)],
        keep=[unbroken.KeepLast(20)],
        health=unbroken.Health(),
    ) as run:
        for _ in run.epochs(epochs):
            for inputs, numbers in run.batches(loader):
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                if run.step_count + 1 == poison_at and not poisoned:
                    poisoned = numbers.tolist()
                if numbers.tolist() == poisoned:
                    loss = loss * float("nan")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss, rate=0.1)
                each_step(run, loss.item())
                if run.step_count == crash_at:
                    raise CrashError(f"</script><script>alert({crash_at})</script>")
            run.record(accuracy=run.step_count / 100)
