"""Gradient accumulation: a checkpoint between two optimizer steps loses nothing that was gathered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken

from . import broken
from .scenes import Brokens, ask_to_stop, batch, fails, run_of, stopped

FACTOR = 4
Act = Callable[[unbroken.Run, int], None]


def stop_at_six(run: unbroken.Run, micro: int) -> None:
    assert micro <= 8
    if micro == 6:
        ask_to_stop()


class TestAccumulation:
    """The next step after a resume is too small (huggingface/transformers#22143)."""

    def trained(self, directory: Path, wrong: Brokens, samples: int, act: Act | None = None) -> list[str]:
        """Train two epochs of micro-batches; `act` is called after each of them."""
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        counters = {"micro": 0}
        loader = DataLoader(list(range(samples)), batch_size=1)
        with run_of(directory, wrong, model=model, optimizer=optimizer, counters=counters) as run:
            for _ in run.epochs(2):
                for index in run.batches(loader):
                    ((model(batch(int(index), 3, 4)) ** 2).mean() / FACTOR).backward()
                    counters["micro"] += 1
                    if counters["micro"] % FACTOR == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                        run.step()
                    if act is not None:
                        act(run, counters["micro"])
        return [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]

    def play(self, directory: Path, samples: int, wrong: Brokens) -> None:
        expected = self.trained(directory / "twin", (), samples)
        with stopped():
            self.trained(directory / "run", wrong, samples, stop_at_six)
        assert self.trained(directory / "run", wrong, samples) == expected

    def test_a_stop_inside_a_window_is_obeyed_at_its_end(self, tmp_path: Path) -> None:
        self.play(tmp_path, 16, ())
        assert unbroken.CheckpointStore(tmp_path / "run").names()[0] == "step-00000002"

    def test_a_window_that_goes_on_in_the_next_epoch_keeps_what_was_gathered(self, tmp_path: Path) -> None:
        # An epoch has six micro-batches: it ends inside a window, and there the stop is obeyed.
        self.play(tmp_path, 6, ())
        assert unbroken.CheckpointStore(tmp_path / "run").names()[0] == "step-00000001"

    def test_the_next_step_is_too_small_where_gradients_are_left_out(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, 6, (broken.NoGradients,))
