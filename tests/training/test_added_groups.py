"""Parameter groups that were added while training ran: they are added again, or it is said why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import unbroken
from unbroken.errors import StateMismatchError

from .runs import restore

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def build(name: str = "Adam") -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """A head that trains from the beginning, and a backbone that is frozen."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"backbone": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    model["backbone"].requires_grad_(False)
    return model, OPTIMIZERS[name](model["head"].parameters())


def unfreeze(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    model["backbone"].requires_grad_(True)
    optimizer.add_param_group(
        {"params": list(model["backbone"].parameters()), "lr": 0.001, "weight_decay": 0.1}
    )


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: range) -> list[str]:
    losses = []
    for seed in seeds:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = (model["head"](model["backbone"](inputs).tanh()) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def save_with_a_group_added(directory: Path, name: str = "Adam") -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = build(name)
    with unbroken.Run(directory, model=model, optimizer=optimizer) as run:
        train(model, optimizer, range(2))
        unfreeze(model, optimizer)
        train(model, optimizer, range(2, 5))
        run.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_added_in_training_is_added_again_and_trains_on_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    model, optimizer = save_with_a_group_added(tmp_path, name)
    expected = train(model, optimizer, range(5, 9))
    again, other = build(name)
    with unbroken.Run(tmp_path, resume="must", model=again, optimizer=other) as run:
        assert run.restored is not None
        report = "\n".join(run.restored.lines())
        assert train(again, other, range(5, 9)) == expected
        run.step()
    assert "group 1 (2 parameters from model.backbone.weight) was added while training ran" in report
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert other.param_groups[1]["weight_decay"] == 0.1
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_it_is_added_again_at_every_resume(tmp_path: Path) -> None:
    model, optimizer = save_with_a_group_added(tmp_path)
    expected = train(model, optimizer, range(5, 9))
    found = []
    for seeds in (range(5, 7), range(7, 9)):
        model, optimizer = build()
        with unbroken.Run(tmp_path, resume="must", model=model, optimizer=optimizer) as run:
            found += train(model, optimizer, seeds)
            run.step()
    assert found == expected


def test_a_script_that_adds_the_group_itself_is_as_before(tmp_path: Path) -> None:
    model, optimizer = save_with_a_group_added(tmp_path)
    expected = train(model, optimizer, range(5, 9))
    again, other = build()
    unfreeze(again, other)
    restore(tmp_path, model=again, optimizer=other)
    assert len(other.param_groups) == 2
    assert train(again, other, range(5, 9)) == expected


def test_parameters_that_no_part_has_are_named_and_nothing_changes(tmp_path: Path) -> None:
    save_with_a_group_added(tmp_path)
    again, other = build()
    before = copy.deepcopy(other.state_dict())
    head = nn.ModuleDict({"head": again["head"]})
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, model=head, optimizer=other)
    assert (
        "group 1 was added while training ran, and its parameter model.backbone.weight is in no part"
        in str(caught.value)
    )
    assert other.state_dict() == before


def test_parameters_that_are_in_another_group_here_are_named(tmp_path: Path) -> None:
    save_with_a_group_added(tmp_path)
    again, _ = build()
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    with pytest.raises(
        StateMismatchError, match=r"its parameter model\.backbone\.bias is in another group here"
    ):
        restore(tmp_path, model=again, optimizer=other)
    assert len(other.param_groups) == 1


def test_more_groups_than_were_saved_are_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
        run.step()
    again, other = build()
    unfreeze(again, other)
    with pytest.raises(StateMismatchError, match="2 parameter groups, the checkpoint has 1"):
        restore(tmp_path, model=again, optimizer=other)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6]),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    ],
)
def test_a_scheduler_built_before_the_group_goes_on_as_it_would_have(
    tmp_path: Path, make: Callable[[torch.optim.Optimizer], Any]
) -> None:
    def trace(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[tuple[float, ...]]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        return rates

    model, optimizer = build()
    scheduler = make(optimizer)
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler) as run:
        trace(optimizer, scheduler, 2)
        unfreeze(model, optimizer)
        trace(optimizer, scheduler, 2)
        run.step()
    expected = trace(optimizer, scheduler, 5)
    again, other = build()
    rebuilt = make(other)
    restore(tmp_path, model=again, optimizer=other, scheduler=rebuilt)
    assert trace(other, rebuilt, 5) == expected
    assert len(expected[0]) == 2
