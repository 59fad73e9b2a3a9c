"""After a roll-back learning rates are lower while optimizers step, and nobody else ever sees that."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.rollbacks import LowerRate, Rollback
from unbroken.training import families
from unbroken.training.health.lowering import Lowering, factor


def rolled_back(factor: float, from_step: int, until_step: int) -> Rollback:
    return Rollback(
        decided_by="health",
        reason="",
        attempt=1,
        found_step=until_step,
        trusted_step=from_step,
        lower_rate=LowerRate(factor=factor, from_step=from_step, until_step=until_step),
    )


def descend(parameter: nn.Parameter, optimizer: Any) -> float:
    """Take a step with a gradient of 1 and return how far it went."""
    before = parameter.item()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return round(before - parameter.item(), 6)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_rate_is_lower_for_the_steps_that_are_named_and_back_after_each(rate: Any) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=rate, foreach=False)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    count = 0
    lowering = Lowering({"model": nn.Linear(1, 1), "optimizer": optimizer}, lambda: count)
    lowering.follow([rolled_back(0.1, from_step=1, until_step=3)])
    group = optimizer.param_groups[0]
    went, seen = [], []
    for _ in range(5):
        went.append(descend(parameter, optimizer))
        seen.append(float(group["lr"]))
        count += 1
        scheduler.step()
    assert went == [0.5, 0.05, 0.025, 0.25, 0.125]
    assert seen == [0.5, 0.5, 0.25, 0.25, 0.125]
    assert type(group["lr"]) is type(rate)
    lowering.close()


def test_a_rate_that_groups_share_is_lowered_once() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    first, second = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [first], "lr": rate}, {"params": [second], "lr": rate}]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    lowering = Lowering({"optimizer": optimizer}, lambda: 0)
    lowering.follow([rolled_back(0.5, 0, 1)])
    second.grad = torch.ones_like(second)
    assert descend(first, optimizer) == 0.25
    assert second.item() == -0.25
    assert rate.item() == 0.5
    lowering.close()


def test_a_step_that_raises_leaves_no_lower_rate_behind() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    lowering = Lowering({"optimizer": optimizer}, lambda: 0)
    lowering.follow([rolled_back(0.5, 0, 1)])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    scheduler.step()
    assert descend(parameter, optimizer) == 0.125
    lowering.close()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert descend(parameter, optimizer) == 0.25


def test_an_optimizer_that_steps_inside_another_one_is_lowered_too() -> None:
    first, second = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    inner = torch.optim.SGD([second], lr=0.5)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            descend(second, inner)
            super().step(closure)

    outer = Outer([first], lr=0.5)
    lowering = Lowering({"outer": outer, "inner": inner}, lambda: 0)
    lowering.follow([rolled_back(0.5, 0, 1)])
    assert descend(first, outer) == 0.25
    assert second.item() == -0.25
    lowering.close()
    assert (inner.param_groups[0]["lr"], outer.param_groups[0]["lr"]) == (0.5, 0.5)


def test_of_an_optimizer_inside_another_the_inner_one_is_lowered() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    wrapper = Wrapper(torch.optim.SGD([parameter], lr=0.5))
    lowering = Lowering({"optimizer": wrapper, "scheduler": StepLR(wrapper.optimizer, 1)}, lambda: 0)
    lowering.follow([rolled_back(0.5, 0, 1)])
    assert descend(parameter, wrapper) == 0.25
    lowering.close()


def test_what_cannot_be_lowered_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Own:
        param_groups: list[object] = []  # noqa: RUF012

    lowering = Lowering({"mine": Own()}, lambda: 0)
    lowering.follow([rolled_back(0.5, 0, 1)])
    assert "the learning rate of mine is not lowered" in capsys.readouterr().err


def test_nothing_is_hooked_once_the_steps_are_past() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    lowering = Lowering({"optimizer": optimizer}, lambda: 7)
    lowering.follow([rolled_back(0.5, 0, 7)])
    assert "step" not in vars(optimizer)
    StepLR(optimizer, step_size=1)
    wrapped = vars(optimizer)["step"]
    lowering.follow([rolled_back(0.5, 0, 8)])
    assert vars(optimizer)["step"] is not wrapped
    lowering.follow([])
    assert vars(optimizer)["step"] is wrapped


def test_roll_backs_that_name_the_same_step_lower_its_rate_together() -> None:
    asked = [
        LowerRate(factor=0.5, from_step=2, until_step=6),
        LowerRate(factor=0.1, from_step=4, until_step=8),
    ]
    assert [round(factor(asked, step), 6) for step in range(2, 10)] == [1, 0.5, 0.5, 0.05, 0.05, 0.1, 0.1, 1]


def train(directory: Path, *, raises_at: int = -1) -> list[tuple[int, float]]:
    """Take a step with each of ten batches, of which number 5 is bad; return how far each one went."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    went = []
    with unbroken.Run(
        directory,
        save=[unbroken.EverySteps(1)],
        health=unbroken.Health(rate_factor=0.5, rate_steps=3),
        parameter=parameter,
        optimizer=optimizer,
    ) as run:
        for _ in run.epochs(1):
            for batch in run.batches(DataLoader(torch.arange(10), batch_size=1)):
                number = int(batch)
                if number == raises_at:
                    raise RuntimeError("a bug of the user")
                went.append((number, descend(parameter, optimizer)))
                run.step(loss=math.nan if number == 5 else 1.0)
    return went


def test_a_run_that_was_rolled_back_takes_small_steps_for_a_while_also_after_a_restart(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError):
        train(tmp_path, raises_at=7)
    went = train(tmp_path)
    # The checkpoint is that of step 5: steps 6 to 8 are small, and the first of them was taken before.
    assert went == [(7, 0.25), (8, 0.25), (9, 0.5)]
    store = CheckpointStore(tmp_path)
    rates = {
        store.get(name).manifest.parts["optimizer"].state["groups"][0]["options"]["lr"]
        for name in store.names()
    }
    assert rates == {0.5}


def test_a_gradient_scaler_among_the_parts_is_known() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert families.has_scaler({"model": nn.Linear(1, 1), "scaler": scaler})
    assert not families.has_scaler({"scaler": torch.amp.GradScaler("cpu", enabled=False)})
