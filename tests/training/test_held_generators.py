"""Generators that parts hold are found, kept under names that no wrapper changes, and restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import StateMismatchError

from .runs import restore, save


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


class Net(nn.Module):
    def __init__(self, *, with_noise: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), Noise() if with_noise else nn.Identity())
        self.augment = {"flip": random.Random(3)}
        self.numpy = np.random.default_rng(5)

    def draw(self) -> list[float]:
        found = [self.augment["flip"].random(), self.numpy.random()]
        return [*found, float(self.body[1](torch.zeros(1)))]


PATHS = ("model.augment['flip']", "model.body.1.generator", "model.numpy")


@pytest.mark.parametrize("saved_compiled", [True, False])
@pytest.mark.parametrize("restored_compiled", [True, False])
def test_they_go_on_whatever_is_wrapped(
    tmp_path: Path, saved_compiled: bool, restored_compiled: bool
) -> None:
    def wrapped(model: nn.Module, compiled: bool) -> Any:
        return torch.compile(model, backend="eager") if compiled else model

    model = Net()
    model.draw()
    save(tmp_path, model=wrapped(model, saved_compiled))
    expected = [model.draw() for _ in range(3)]
    again = Net()
    with unbroken.Run(tmp_path, model=wrapped(again, restored_compiled)) as run:
        assert run.restored is not None
        assert run.restored.generators[-3:] == PATHS
        assert [again.draw() for _ in range(3)] == expected


def test_what_is_drawn_before_the_first_batch_is_undone(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path, model=model)
    expected = model.draw()
    again = Net()
    with unbroken.Run(tmp_path, model=again) as run:
        again.draw()
        for _ in run.epochs(1):
            assert again.draw() == expected


def test_one_that_is_on_one_side_only_is_refused_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path / "with", model=Net())
    with pytest.raises(
        StateMismatchError, match=r"rng: model\.body\.1\.generator: no part holds this generator"
    ):
        restore(tmp_path / "with", model=Net(with_noise=False))
    restore(tmp_path / "with", model=Net(with_noise=False), allow=["*.generator"])
    save(tmp_path / "without", model=Net(with_noise=False))
    with pytest.raises(StateMismatchError, match=r"rng: model\.body\.1\.generator: the checkpoint lacks"):
        restore(tmp_path / "without", model=Net())
    restore(tmp_path / "without", model=Net(), allow=["*.generator"])
