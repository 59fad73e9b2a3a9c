"""Loss jumps: the first steps after a resume are as good as those before it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from . import broken
from .scenes import Brokens, ask_to_stop, batch, fails, restore, run_of, save, stopped, train


def built(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}


class TestMoments:
    """Weights and schedule were saved, moments were not (EvolvingLMMs-Lab/OneVision-Encoder#65)."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = built(1)
        train(parts["model"], parts["optimizer"], range(20))
        save(directory, wrong, **parts)
        expected = train(parts["model"], parts["optimizer"], range(20, 30))
        again = built(2)
        restore(directory, wrong, **again)
        for parameter in again["model"].parameters():
            assert "exp_avg" in again["optimizer"].state[parameter]
        assert train(again["model"], again["optimizer"], range(20, 30)) == expected

    def test_the_losses_after_a_resume_are_those_of_the_run_that_never_stopped(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_they_are_not_where_the_moments_are_forgotten(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.NoMoments,))

    def test_an_optimizer_that_trains_and_is_no_part_is_refused_when_the_first_step_is_complete(
        self, tmp_path: Path
    ) -> None:
        # No handler is in this: what is no part has none.
        parts = built(1)
        with (
            pytest.raises(UnsupportedStateError, match=r"Adam that trains model\.0\.weight"),
            run_of(tmp_path, (), model=parts["model"]) as run,
        ):
            train(parts["model"], parts["optimizer"], range(1))
            run.step()

    def test_a_checkpoint_without_the_optimizer_is_refused(self, tmp_path: Path) -> None:
        parts = built(1)
        save(tmp_path, model=parts["model"])
        with pytest.raises(StateMismatchError, match="optimizer: the checkpoint lacks this part"):
            restore(tmp_path, **built(2))


class TestEveryBatchOnce:
    """The skip of the resumed epoch was applied to all that follow (huggingface/accelerate#1451)."""

    # No handler is in this: the position in the data belongs to the run itself.
    def epochs(self, directory: Path, stop_at: int = 0) -> list[list[int]]:
        self.found: list[list[int]] = []
        loader = DataLoader(list(range(20)), batch_size=2, shuffle=True)
        with run_of(directory, ()) as run:
            for _ in run.epochs(3):
                self.found.append([])
                for indices in run.batches(loader):
                    self.found[-1] += indices.tolist()
                    run.step()
                    if run.step_count == stop_at:
                        ask_to_stop()
        return self.found

    def test_only_the_resumed_epoch_is_short(self, tmp_path: Path) -> None:
        with stopped():
            self.epochs(tmp_path, stop_at=6)
        first = self.found[0]
        rest = self.epochs(tmp_path)
        assert [len(epoch) for epoch in rest] == [8, 20, 20]
        assert sorted(first + rest[0]) == sorted(rest[1]) == sorted(rest[2]) == list(range(20))


class TestAfterABlowUp:
    """The last checkpoint holds NaN, and to resume from it is useless (Rikorose/DeepFilterNet#30)."""

    # No handler is in this: which checkpoint to go on from is chosen, not restored.
    def train(self, directory: Path, last: int, bad: int | None, **keywords: Any) -> int:
        """Train to step `last`, the gradient of step `bad` infinite; return where the attempt began."""
        parts = built(1)
        with run_of(directory, (), save=[unbroken.EverySteps(5)], **keywords, **parts) as run:
            began = run.step_count
            while run.step_count < last:
                loss = (parts["model"](batch(run.step_count, 8, 4)) ** 2).mean()
                parts["optimizer"].zero_grad()
                (loss * (math.inf if run.step_count == bad else 1.0)).backward()
                parts["optimizer"].step()
                run.step(loss=loss)
            assert last < 20 or all(bool(weight.isfinite().all()) for weight in parts["model"].parameters())
        return began

    def test_a_run_goes_on_from_before_it_and_reaches_the_end_without_the_bad_batch(
        self, tmp_path: Path
    ) -> None:
        self.train(tmp_path, 15, bad=12)
        assert unbroken.CheckpointStore(tmp_path).names()[-2:] == ["step-00000010", "step-00000015"]
        assert self.train(tmp_path, 20, bad=None) == 10
        assert unbroken.CheckpointStore(tmp_path).names()[-1] == "step-00000020"
        assert (tmp_path / "quarantine/step-00000015").is_dir()

    def test_it_does_not_where_nobody_looks(self, tmp_path: Path) -> None:
        self.train(tmp_path, 15, bad=12, non_finite=["*"])
        with fails():
            assert self.train(tmp_path, 20, bad=None, non_finite=["*"]) == 10

    def test_it_is_resumed_if_it_is_asked_for_by_name(self, tmp_path: Path) -> None:
        self.train(tmp_path, 15, bad=12)
        assert self.train(tmp_path, 15, bad=None, resume="step-00000015") == 15
