"""Schedules: the rates after a resume are those of the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from unbroken.errors import StateMismatchError

from . import broken
from .scenes import Broken, Brokens, fails, restore, save

Schedule = Callable[[torch.optim.Optimizer], Any]


def built(schedule: Schedule, *, scheduler_last: bool, rate: float = 1.0) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    # Building it writes a rate into the optimizer.
    parts = {"scheduler": schedule(optimizer), "model": model, "optimizer": optimizer}
    return dict(reversed(parts.items())) if scheduler_last else parts


def rates(parts: dict[str, Any], steps: int) -> list[str]:
    """Return the rates that the optimizer is stepped with, to the last bit."""
    found = []
    for _ in range(steps):
        found.append(float(parts["optimizer"].param_groups[0]["lr"]).hex())
        parts["optimizer"].step()
        # On a metric that gets no better, where one is asked for.
        is_plateau = isinstance(parts["scheduler"], lr_scheduler.ReduceLROnPlateau)
        parts["scheduler"].step(*[1.0] * is_plateau)
    return found


def play(directory: Path, schedule: Schedule, stop_at: int, wrong: Brokens, scheduler_last: bool) -> None:
    parts = built(schedule, scheduler_last=scheduler_last)
    rates(parts, stop_at)
    save(directory, wrong, **parts)
    expected = rates(parts, 20 - stop_at)
    again = built(schedule, scheduler_last=scheduler_last)
    restore(directory, wrong, **again)
    assert rates(again, 20 - stop_at) == expected


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return lr_scheduler.SequentialLR(
        optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 15)], milestones=[5]
    )


class TestRebuiltSchedulers:
    """Building the schedulers anew changes the rate of the restored optimizer (pytorch/pytorch#119168)."""

    @pytest.mark.parametrize("scheduler_last", [False, True])
    @pytest.mark.parametrize("stop_at", [3, 5, 7])
    def test_a_stop_before_at_and_after_the_milestone_changes_no_rate(
        self, tmp_path: Path, stop_at: int, scheduler_last: bool
    ) -> None:
        play(tmp_path, warm_up_then_cosine, stop_at, (), scheduler_last)

    @pytest.mark.parametrize("stop_at", [3, 5, 7])
    @pytest.mark.parametrize("wrong", [broken.RateOfTheConstructor, broken.OnlyTheCount])
    def test_it_does_where_the_constructor_wins_or_the_schedule_is_computed_anew(
        self, tmp_path: Path, stop_at: int, wrong: Broken
    ) -> None:
        with fails():
            play(tmp_path, warm_up_then_cosine, stop_at, (wrong,), True)


class TestClosures:
    """The decay starts from a rate that has decayed already (huggingface/nanotron#256)."""

    @staticmethod
    def decay(optimizer: torch.optim.Optimizer) -> Any:
        start = optimizer.param_groups[0]["lr"]
        return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, (start - 0.05 * step) / start))

    @pytest.mark.parametrize("stop_at", [1, 9])
    def test_a_schedule_that_reads_the_first_rate_goes_on_in_its_decay(
        self, tmp_path: Path, stop_at: int
    ) -> None:
        play(tmp_path, self.decay, stop_at, (), False)

    def test_it_does_not_where_the_rate_of_the_moment_is_taken_for_the_first(self, tmp_path: Path) -> None:
        with fails():
            play(tmp_path, self.decay, 9, (broken.BaseOfTheMoment,), False)

    def test_a_function_that_gives_other_rates_is_reported(self, tmp_path: Path) -> None:
        parts = built(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), **FIRST)
        rates(parts, 5)
        save(tmp_path, **parts)
        again = built(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), **FIRST)
        lines = restore(tmp_path, **again)
        assert any("the function of the script gives 0.03125 at step 5" in line for line in lines)


FIRST: dict[str, Any] = {"scheduler_last": False}
SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 12]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=9),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": warm_up_then_cosine,
}


class TestWithoutTheOptimizer:
    """The scheduler says epoch 10, and the rate is still the first one (pytorch/pytorch#29697)."""

    def play(self, directory: Path, schedule: Schedule, wrong: Brokens, saved: bool) -> None:
        parts = built(schedule, **FIRST)
        begun = parts["optimizer"].param_groups[0]["lr"]
        rates(parts, 8)
        rate = parts["optimizer"].param_groups[0]["lr"]
        assert rate != begun
        optimizer = {"optimizer": parts["optimizer"]} if saved else {}
        save(directory, wrong, scheduler=parts["scheduler"], model=parts["model"], **optimizer)
        again = built(schedule, **FIRST)
        lines = restore(
            directory, wrong, scheduler=again["scheduler"], model=again["model"], allow=["optimizer"]
        )
        expected = f"lr: {begun!r} of the optimizer, which is no part, is used, the checkpoint has {rate!r}"
        assert any(expected in line for line in lines)

    @pytest.mark.parametrize("saved", [False, True])
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_a_rate_that_no_part_restores_is_named(self, tmp_path: Path, name: str, saved: bool) -> None:
        self.play(tmp_path, SCHEDULES[name], (), saved)

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_beside_a_fresh_optimizer_the_rate_that_is_in_force_is_said(
        self, tmp_path: Path, name: str
    ) -> None:
        parts = built(SCHEDULES[name], **FIRST)
        rates(parts, 8)
        save(tmp_path, **parts)
        again = built(SCHEDULES[name], **FIRST)
        lines = restore(tmp_path, **again, fresh=["optimizer"])
        assert "optimizer: begins as the script built it" in lines
        rate = again["optimizer"].param_groups[0]["lr"]
        assert any(line.startswith(f"learning rate {rate:g}") for line in lines)

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_it_is_not_where_nobody_looks_at_the_optimizer(self, tmp_path: Path, name: str) -> None:
        with fails():
            self.play(tmp_path, SCHEDULES[name], (broken.SilentSchedulers,), False)


def one_cycle(steps: int) -> Schedule:
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps)


class TestHorizon:
    """A longer training, and the schedule ends where it did or raises (deepinsight/insightface#2143)."""

    def saved(self, directory: Path, wrong: Brokens = ()) -> list[str]:
        """Save after 9 of 10 planned steps; return the rates of the plan from there on."""
        parts = built(one_cycle(10), **FIRST)
        rates(parts, 9)
        save(directory, wrong, **parts)
        return [float(parts["optimizer"].param_groups[0]["lr"]).hex()]

    def play(self, directory: Path, wrong: Brokens) -> None:
        self.saved(directory, wrong)
        again = built(one_cycle(20), **FIRST)
        with pytest.raises(StateMismatchError, match=r"total_steps is 10 .* choose horizon='keep'"):
            restore(directory, wrong, **again)

    def test_another_length_is_refused_until_one_chooses(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_raises_hours_later_where_the_schedule_is_just_loaded(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.SilentSchedulers,))
        again = built(one_cycle(20), **FIRST)
        restore(tmp_path, (broken.SilentSchedulers,), **again)
        with pytest.raises(ValueError, match="Tried to step"):
            rates(again, 11)

    @pytest.mark.parametrize("how", ["keep", "stretch", "hold"])
    def test_each_choice_gives_a_rate_for_every_step(self, tmp_path: Path, how: str) -> None:
        last = self.saved(tmp_path)
        again = built(one_cycle(20), **FIRST)
        lines = restore(tmp_path, **again, horizon=how)
        assert any("total_steps" in line for line in lines)
        found = rates(again, 11)
        if how == "stretch":
            # The curve of a run that was planned for 20 steps from the beginning.
            assert found == rates(built(one_cycle(20), **FIRST), 20)[9:]
        else:
            # It was at its lowest already; to hold the rate and to end the old curve are the same here.
            assert found == last * 11


class TestSettings:
    """Nobody said that the new rate has no effect (huggingface/transformers#18070)."""

    def built(self, rate: float, decay: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay),
        }

    def play(self, directory: Path, wrong: Brokens) -> None:
        save(directory, wrong, **self.built(0.25, 0.5))
        again = self.built(0.125, 0.0)
        lines = restore(directory, wrong, **again)
        assert any("lr: 0.25 is kept, the script sets 0.125" in line for line in lines)
        assert any("weight_decay: 0.5 is kept, the script sets 0.0" in line for line in lines)
        group = again["optimizer"].param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
        again = self.built(0.125, 0.0)
        lines = restore(directory, wrong, **again, override=["optimizer.lr", "optimizer.weight_decay"])
        assert any("lr: 0.125 of the script is used, the checkpoint has 0.25" in line for line in lines)
        group = again["optimizer"].param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.125, 0.0)

    def test_each_setting_is_listed_with_the_winner_and_may_be_overridden(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize("wrong", [broken.SilentOptimizers, broken.OptimizersOwnState])
    def test_it_is_not_where_loading_replaces_settings_in_silence(
        self, tmp_path: Path, wrong: Broken
    ) -> None:
        with fails():
            self.play(tmp_path, (wrong,))

    def test_a_resume_at_a_rate_of_zero_is_said(self, tmp_path: Path) -> None:
        def finished(optimizer: torch.optim.Optimizer) -> Any:
            return lr_scheduler.PolynomialLR(optimizer, 9)

        parts = built(finished, **FIRST)
        rates(parts, 9)
        save(tmp_path, **parts)
        lines = restore(tmp_path, **built(finished, **FIRST))
        assert any("every learning rate is 0" in line for line in lines)
