"""Gradient accumulation: a save waits for the step, and gradients that stay over are kept."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.state.handlers import GRADIENTS

WINDOW = 4
# Not a multiple of the window: two batches of each epoch go into the first step of the next one.
BATCHES = 10


class Training:
    """What a script builds, and its loop; `losses` is what it saw."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(2 * BATCHES, 3, generator=torch.Generator().manual_seed(1)))
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        self.run = unbroken.Run(directory, model=self.model, optimizer=self.optimizer, **options)
        self.losses: list[str] = []
        self.gathered = 0

    def batch(self, inputs: torch.Tensor) -> None:
        loss = (self.model(inputs) ** 2).mean() / WINDOW
        loss.backward()
        self.losses.append(float(loss.detach()).hex())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.step()

    def train(
        self, epochs: int, *, save_at: tuple[int, int] | None = None, stop_at: int | None = None
    ) -> None:
        """Count the window anew in each epoch, as `enumerate` does; ask for a save at (epoch, batch)."""
        with self.run as run:
            for epoch in run.epochs(epochs):
                for index, (inputs,) in enumerate(run.batches(self.loader)):
                    self.batch(inputs)
                    if (epoch, index) == save_at:
                        run.save()
                    if (index + 1) % WINDOW == 0:
                        self.step()
                        if run.step_count == stop_at:
                            raise KeyboardInterrupt


def has_gradients(directory: Path) -> list[bool]:
    store = CheckpointStore(directory)
    return [GRADIENTS in store.get(name).manifest.parts["model"].state for name in store.names()]


def steps(directory: Path) -> list[int]:
    store = CheckpointStore(directory)
    return [store.get(name).step for name in store.names()]


def test_a_save_asked_for_inside_a_step_waits_for_it(tmp_path: Path) -> None:
    expected = Training(tmp_path / "expected")
    expected.train(3)
    first = Training(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        first.train(3, save_at=(0, 5), stop_at=2)
    # The fifth batch of the first epoch is inside its second step; the loop was left before the next one.
    assert steps(tmp_path / "run") == []
    first = Training(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        first.train(3, save_at=(0, 5), stop_at=3)
    assert steps(tmp_path / "run") == [2]
    assert has_gradients(tmp_path / "run") == [False]
    second = Training(tmp_path / "run")
    second.train(3)
    assert first.losses[:8] + second.losses == expected.losses


def test_gradients_that_stay_over_at_the_end_of_an_epoch_are_kept(tmp_path: Path) -> None:
    expected = Training(tmp_path / "expected")
    expected.train(4)
    found: list[str] = []
    for epochs in (1, 2, 3, 4):
        part = Training(tmp_path / "run", save=[unbroken.EveryEpochs(1)], keep=[])
        part.train(epochs)
        found += part.losses
    assert found == expected.losses
    assert has_gradients(tmp_path / "run") == [True] * 4
    for one, two in zip(expected.model.parameters(), part.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_save_right_after_such_a_resume_keeps_them_again(tmp_path: Path) -> None:
    expected = Training(tmp_path / "expected")
    expected.train(2)
    first = Training(tmp_path / "run")
    first.train(1)
    middle = Training(tmp_path / "run", keep=[])
    with middle.run as run:
        run.record(accuracy=0.5)
    assert has_gradients(tmp_path / "run") == [True, True]
    last = Training(tmp_path / "run")
    last.train(2)
    assert first.losses + last.losses == expected.losses


def test_an_evaluation_after_the_last_step_keeps_none(tmp_path: Path) -> None:
    training = Training(tmp_path, save=[unbroken.EveryEpochs(1)], keep=[])
    with training.run as run:
        for _ in run.epochs(2):
            for (inputs,) in run.batches(training.loader):
                # The gradients of the step stay where they are until the next one.
                training.optimizer.zero_grad()
                training.batch(inputs)
                training.optimizer.step()
                run.step()
            with torch.no_grad():
                for (inputs,) in run.batches(training.loader, name="evaluation"):
                    training.model(inputs)
    assert has_gradients(tmp_path) == [False, False]


def test_a_save_asked_for_in_an_evaluation_is_done_there(tmp_path: Path) -> None:
    training = Training(tmp_path, save=[], keep=[])
    with training.run as run:
        for _ in run.epochs(1):
            for (inputs,) in run.batches(training.loader):
                training.batch(inputs)
                training.step()
            for index, _ in enumerate(run.batches(training.loader, name="evaluation")):
                if index == 2:
                    run.save()
                assert len(steps(tmp_path)) <= 1
    assert steps(tmp_path) == [BATCHES, BATCHES]
    assert has_gradients(tmp_path) == [False, False]


def test_an_epoch_shorter_than_a_window_keeps_what_it_gathered(tmp_path: Path) -> None:
    def train(training: Training, epochs: int) -> None:
        with training.run as run:
            for _ in run.epochs(epochs):
                for index, (inputs,) in enumerate(run.batches(training.loader)):
                    if index >= 3:
                        break
                    training.batch(inputs)
                training.gathered += 1
                if training.gathered % 2 == 0:
                    training.step()

    expected = Training(tmp_path / "expected")
    train(expected, 6)
    found: list[str] = []
    for epochs in (1, 3, 6):
        part = Training(tmp_path / "run")
        part.gathered = {1: 0, 3: 1, 6: 3}[epochs]
        train(part, epochs)
        found += part.losses
    assert found == expected.losses


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_a_step_that_is_counted_for_each_batch_is_complete_with_its_last_one(
    tmp_path: Path, stop_at: int
) -> None:
    def train(training: Training, stop_at: int | None = None) -> None:
        with training.run as run:
            for _ in run.epochs(2):
                for (inputs,) in run.batches(training.loader):
                    training.batch(inputs)
                    if run.step_count % 2:
                        training.optimizer.step()
                        training.optimizer.zero_grad()
                    run.step()
                    if run.step_count == stop_at:
                        signal.raise_signal(signal.SIGTERM)

    expected = Training(tmp_path / "expected")
    train(expected)
    first = Training(tmp_path / "run")
    with pytest.raises(SystemExit):
        train(first, stop_at)
    assert len(first.losses) % 2 == 0
    second = Training(tmp_path / "run")
    train(second)
    assert first.losses + second.losses == expected.losses
