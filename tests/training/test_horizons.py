"""A schedule whose length was changed: refused until the user chooses, then each choice gives known rates."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError
from unbroken.state.handlers import Horizon

from ..some import named, some
from .runs import restore, save

Schedule = Callable[[torch.optim.Optimizer, int], Any]


def warmup_and_cosine(optimizer: torch.optim.Optimizer, length: int) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, length - 3),
        ],
        milestones=[3],
    )


def one_cycle(optimizer: torch.optim.Optimizer, length: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=length)


SCHEDULES: dict[str, Schedule] = {
    "CosineAnnealingLR": lambda optimizer, length: lr_scheduler.CosineAnnealingLR(optimizer, length, 0.01),
    "OneCycleLR": one_cycle,
    "OneCycleLR of three phases": lambda optimizer, length: lr_scheduler.OneCycleLR(
        optimizer, 0.5, epochs=length // 5, steps_per_epoch=5, three_phase=True, anneal_strategy="linear"
    ),
    "LinearLR": lambda optimizer, length: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=length),
    "PolynomialLR": lambda optimizer, length: lr_scheduler.PolynomialLR(optimizer, length, power=1.5),
    "ConstantLR": lambda optimizer, length: lr_scheduler.ConstantLR(optimizer, total_iters=length - 2),
    "MultiStepLR": lambda optimizer, length: lr_scheduler.MultiStepLR(optimizer, [length // 2, length]),
    "SequentialLR": warmup_and_cosine,
    "ChainedScheduler": lambda optimizer, length: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, total_iters=length), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "SWALR": lambda optimizer, length: swa_utils.SWALR(optimizer, 0.01, anneal_epochs=length),
}


def build(
    schedule: Schedule, length: int, *, rate: float = 0.2, as_tensor: bool = False
) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=torch.tensor(rate) if as_tensor else rate, foreach=False
    )
    scheduler = schedule(optimizer, length)
    return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[tuple[float, float]]:
    """The learning rate and momentum that each of the next steps is taken with."""
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append((float(group["lr"]), group["betas"][0]))
        optimizer.step()
        scheduler.step()
    return found


def resumed(
    directory: Path, schedule: Schedule, length: int, *, horizon: Horizon, steps: int, **choices: Any
) -> list[tuple[float, float]]:
    """Go on with a schedule of another length, and save after `steps`."""
    optimizer, scheduler, parts = build(schedule, length)
    with unbroken.Run(directory, resume="must", horizon=horizon, **parts, **choices) as run:
        found = rates(optimizer, scheduler, steps)
        run.step()
    return found


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]


@pytest.fixture
def stopped(tmp_path: Path, schedule: Schedule) -> Path:
    """A run that was planned for 10 steps and stopped at 9."""
    optimizer, scheduler, parts = build(schedule, 10)
    rates(optimizer, scheduler, 9)
    save(tmp_path, **parts)
    return tmp_path


class TestEverySchedule:
    def test_another_length_is_refused_before_anything_changes(
        self, stopped: Path, schedule: Schedule
    ) -> None:
        optimizer, scheduler, parts = build(schedule, 20)
        before = copy.deepcopy(optimizer.state_dict()), repr(scheduler.state_dict())
        with pytest.raises(StateMismatchError) as caught:
            restore(stopped, **parts)
        for choice in ("keep", "stretch", "hold"):
            assert choice in str(caught.value)
        assert (optimizer.state_dict(), repr(scheduler.state_dict())) == before

    def test_stretched_the_rates_are_those_of_a_run_planned_so_from_the_start(
        self, stopped: Path, schedule: Schedule
    ) -> None:
        expected = rates(*build(schedule, 20)[:2], 20)
        assert resumed(stopped, schedule, 20, horizon="stretch", steps=5) == expected[9:14]
        # And again: the checkpoint has the new length by now.
        assert resumed(stopped, schedule, 20, horizon="stretch", steps=6) == expected[14:]

    def test_stretched_once_it_needs_no_choice_any_more(self, stopped: Path, schedule: Schedule) -> None:
        expected = rates(*build(schedule, 20)[:2], 20)
        resumed(stopped, schedule, 20, horizon="stretch", steps=5)
        optimizer, scheduler, parts = build(schedule, 20)
        restore(stopped, **parts)
        assert rates(optimizer, scheduler, 6) == expected[14:]

    def test_held_the_rate_stays_where_it_is_over_any_number_of_resumes(
        self, stopped: Path, schedule: Schedule
    ) -> None:
        optimizer, scheduler, _ = build(schedule, 10)
        rates(optimizer, scheduler, 9)
        present = (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0])
        for _ in range(3):
            assert resumed(stopped, schedule, 20, horizon="hold", steps=5) == [present] * 5

    def test_kept_the_old_curve_goes_on_over_any_number_of_resumes(
        self, stopped: Path, schedule: Schedule
    ) -> None:
        optimizer, scheduler, _ = build(schedule, 10)
        is_one_cycle = isinstance(scheduler, lr_scheduler.OneCycleLR)
        expected = rates(optimizer, scheduler, 10 if is_one_cycle else 24)
        if is_one_cycle:
            # Where torch would raise, the last rate is held.
            expected += [expected[-1]] * 14
        for begin in (9, 14, 19):
            found = resumed(stopped, schedule, 20, horizon="keep", steps=5)
            assert found == expected[begin : begin + 5]

    @pytest.mark.parametrize("horizon", some(named(["stretch", "keep", "hold"]), one_in=3))
    def test_a_length_that_is_as_before_needs_no_choice_and_gives_the_old_curve(
        self, stopped: Path, schedule: Schedule, horizon: Horizon
    ) -> None:
        expected = rates(*build(schedule, 10)[:2], 10)
        assert resumed(stopped, schedule, 10, horizon=horizon, steps=1) == expected[9:]

    @pytest.mark.parametrize("horizon", some(named(["stretch", "keep", "hold"]), one_in=3))
    def test_the_state_stays_plain_data(self, stopped: Path, schedule: Schedule, horizon: Horizon) -> None:
        optimizer, scheduler, parts = build(schedule, 20)
        class_before = type(scheduler).__qualname__
        with unbroken.Run(stopped, resume="must", horizon=horizon, **parts):
            rates(optimizer, scheduler, 2)
        # Neither functions nor objects: JSON takes it as it is.
        json.dumps(scheduler.state_dict())
        copy.deepcopy(scheduler).step()
        assert type(scheduler).__qualname__ == class_before


class TestKnownRates:
    def test_a_cosine_of_10_steps_resumed_for_20(self, tmp_path: Path) -> None:
        def cosine(optimizer: torch.optim.Optimizer, length: int) -> Any:
            return lr_scheduler.CosineAnnealingLR(optimizer, length)

        def half_cosine(step: int, length: int) -> float:
            return 0.1 * (1 + math.cos(math.pi * step / length))

        curves: dict[Horizon, list[float]] = {
            "keep": [half_cosine(step, 10) for step in range(9, 20)],
            "stretch": [half_cosine(step, 20) for step in range(9, 20)],
            "hold": [half_cosine(9, 10)] * 11,
        }
        for how, curve in curves.items():
            directory = tmp_path / how
            optimizer, scheduler, parts = build(cosine, 10)
            rates(optimizer, scheduler, 9)
            save(directory, **parts)
            found = resumed(directory, cosine, 20, horizon=how, steps=11)
            assert [rate for rate, _ in found] == pytest.approx(curve, abs=1e-9)

    def test_one_cycle_that_is_over_holds_its_last_rate_and_never_raises(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = build(one_cycle, 10)
        last = rates(optimizer, scheduler, 10)[-1]
        # Its tenth step has raised the rate again, for an optimizer step that was not planned.
        assert optimizer.param_groups[0]["lr"] > last[0]
        save(tmp_path, **parts)
        assert resumed(tmp_path, one_cycle, 20, horizon="keep", steps=30) == [last] * 30

    def test_the_horizon_inside_a_sequence_is_named(self, tmp_path: Path) -> None:
        _, _, parts = build(warmup_and_cosine, 10)
        save(tmp_path, **parts)
        _, _, parts = build(warmup_and_cosine, 20)
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, **parts)
        assert (
            "scheduler: schedulers 1 (CosineAnnealingLR) T_max is 7 in the checkpoint, 17 in the script"
            in str(caught.value)
        )

    def test_milestones_of_a_sequence_are_a_horizon(self, tmp_path: Path) -> None:
        def sequence(optimizer: torch.optim.Optimizer, length: int) -> Any:
            inner = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
            return lr_scheduler.SequentialLR(optimizer, inner, [length])

        optimizer, scheduler, parts = build(sequence, 6)
        rates(optimizer, scheduler, 8)
        save(tmp_path, **parts)
        expected = rates(*build(sequence, 12)[:2], 20)
        assert resumed(tmp_path, sequence, 12, horizon="stretch", steps=12) == expected[8:]

    def test_a_length_that_repeats_for_ever_is_no_horizon(self, tmp_path: Path) -> None:
        def steps_of(optimizer: torch.optim.Optimizer, length: int) -> Any:
            return lr_scheduler.StepLR(optimizer, length)

        _, _, parts = build(steps_of, 5)
        save(tmp_path, **parts)
        _, _, parts = build(steps_of, 7)
        with unbroken.Run(tmp_path, resume="must", **parts) as run:
            assert run.restored is not None
            assert "step_size: 5 is kept, the script sets 7" in "\n".join(run.restored.lines())


class TestWithOtherChanges:
    def test_stretched_with_another_base_rate_kept_the_curve_has_the_old_height(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = build(warmup_and_cosine, 10, rate=0.4)
        rates(optimizer, scheduler, 6)
        save(tmp_path, **parts)
        expected = rates(*build(warmup_and_cosine, 20, rate=0.4)[:2], 12)
        found = resumed(tmp_path, warmup_and_cosine, 20, horizon="stretch", steps=6)
        assert [rate for rate, _ in found] == pytest.approx([rate for rate, _ in expected[6:]])

    def test_stretched_with_the_base_rate_of_the_script_the_curve_is_the_scripts(
        self, tmp_path: Path
    ) -> None:
        optimizer, scheduler, parts = build(warmup_and_cosine, 10, rate=0.4)
        rates(optimizer, scheduler, 6)
        save(tmp_path, **parts)
        expected = rates(*build(warmup_and_cosine, 20)[:2], 18)
        found = resumed(
            tmp_path, warmup_and_cosine, 20, horizon="stretch", steps=6, override=["optimizer.lr"]
        )
        assert [rate for rate, _ in found] == pytest.approx([rate for rate, _ in expected[6:12]])
        found = resumed(
            tmp_path, warmup_and_cosine, 20, horizon="stretch", steps=6, override=["optimizer.lr"]
        )
        assert [rate for rate, _ in found] == pytest.approx([rate for rate, _ in expected[12:]])

    @pytest.mark.parametrize("horizon", ["keep", "stretch", "hold"])
    def test_a_rate_that_is_a_tensor_stays_the_same_tensor(self, tmp_path: Path, horizon: Horizon) -> None:
        optimizer, scheduler, parts = build(SCHEDULES["LinearLR"], 10, as_tensor=True)
        rates(optimizer, scheduler, 5)
        save(tmp_path, **parts)
        optimizer, scheduler, parts = build(SCHEDULES["LinearLR"], 20, as_tensor=True)
        rate = optimizer.param_groups[0]["lr"]
        with unbroken.Run(tmp_path, resume="must", horizon=horizon, **parts):
            found = rates(optimizer, scheduler, 4)
        assert optimizer.param_groups[0]["lr"] is rate
        lengths = {"keep": 10, "stretch": 20, "hold": 10}
        expected = rates(*build(SCHEDULES["LinearLR"], lengths[horizon], as_tensor=True)[:2], 9)[5:]
        assert found == (expected if horizon != "hold" else expected[:1] * 4)

    def test_the_next_checkpoints_have_what_is_in_force(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = build(one_cycle, 10)
        rates(optimizer, scheduler, 5)
        save(tmp_path, **parts)
        resumed(tmp_path, one_cycle, 20, horizon="stretch", steps=2)
        newest = CheckpointStore(tmp_path).latest()
        assert newest is not None
        assert newest.manifest.parts["scheduler"].state["state"]["total_steps"] == 20
