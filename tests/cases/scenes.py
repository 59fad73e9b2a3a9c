"""What the cases share: runs with broken handlers, training that is a function of the step, and twins.

A case is a function of the broken handlers it is played with: with none it passes, with each of those
that the state depends on it fails.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import UnbrokenError

# Makes a broken handler; it gets the keywords of the run, the parts among them.
Broken: TypeAlias = Callable[[Mapping[str, object]], Any]
Brokens: TypeAlias = Sequence[Broken]


def run_of(directory: Path, broken: Brokens, **keywords: Any) -> unbroken.Run:
    """Return a run that asks the broken handlers before those of the library."""
    return unbroken.Run(directory, handlers=[make(keywords) for make in broken], **keywords)


def fails() -> Any:
    """Expect that a case does not hold: one of its assertions fails, or the library refuses."""
    return pytest.raises((AssertionError, UnbrokenError, pytest.fail.Exception))


def ask_to_stop() -> None:
    """Ask as schedulers of clusters do: the run saves at its next boundary and leaves by SystemExit."""
    signal.raise_signal(signal.SIGTERM)


def stopped() -> Any:
    """Expect a run to leave its block because it was asked to stop."""
    return pytest.raises(SystemExit, match="75")


def batch(step: int, *shape: int) -> torch.Tensor:
    """Return the batch of a step, the same in every attempt."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 4) -> list[str]:
    """Train for the steps of these numbers and return the losses, to the last bit."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (model(batch(step, 8, width)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def save(directory: Path, broken: Brokens = (), **keywords: Any) -> None:
    with run_of(directory, broken, **keywords) as run:
        run.step()


def restore(directory: Path, broken: Brokens = (), **keywords: Any) -> list[str]:
    """Restore, and return the report for people."""
    with run_of(directory, broken, resume="must", **keywords) as run:
        assert run.restored is not None
        return run.restored.lines()
