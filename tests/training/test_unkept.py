"""What trains the parts of a run and is no part is found at the first step, not at the first resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import UnsupportedStateError


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


class Trainer:
    """Keeps state in a way of its own, and holds what it is given."""

    def __init__(self, *held: object) -> None:
        self.held = {"all": list(held)}

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_an_optimizer_that_was_forgotten_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    message = r"the state of a torch\.optim\.adam\.Adam that trains model\.weight and 1 more"
    with unbroken.Run(tmp_path, model=model) as run:
        train(model, optimizer)
        with pytest.raises(UnsupportedStateError, match=message):
            run.step()


def test_a_scheduler_that_was_forgotten_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
        train(model, optimizer)
        with pytest.raises(UnsupportedStateError, match="optimizer: a learning rate scheduler of it"):
            run.step()


def test_where_a_part_holds_them_it_is_only_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with unbroken.Run(tmp_path, model=model, trainer=Trainer(optimizer)) as run:
        for _ in range(2):
            train(model, optimizer)
            run.step()
    assert capsys.readouterr().err.count("not kept: the state of a torch.optim.adam.Adam") == 1


@pytest.mark.parametrize("part", [torch.amp.GradScaler("cpu"), Trainer()], ids=["a scaler", "a meter"])
def test_another_part_with_a_state_of_its_own_is_no_excuse(tmp_path: Path, part: object) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with unbroken.Run(tmp_path, model=model, other=part) as run:
        train(model, optimizer)
        with pytest.raises(UnsupportedStateError, match="that trains model"):
            run.step()


def test_an_optimizer_that_comes_into_use_later_is_refused_at_its_first_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    first, second = torch.optim.Adam(model.parameters()), torch.optim.AdamW(model.parameters())
    with unbroken.Run(tmp_path, model=model, optimizer=first) as run:
        for _ in range(3):
            train(model, first)
            run.step()
        train(model, second)
        with pytest.raises(UnsupportedStateError, match=r"the state of a torch\.optim\.adamw\.AdamW"):
            run.step()


def test_each_optimizer_has_to_have_its_own_scheduler_among_the_parts(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.optim.lr_scheduler.StepLR(second, 3)
    parts = {"model": model, "other": other, "optimizer": optimizer, "second": second}
    with unbroken.Run(tmp_path, **parts, scheduler=scheduler) as run:
        train(model, optimizer)
        with pytest.raises(UnsupportedStateError, match="second: a learning rate scheduler of it"):
            run.step()


def test_what_trains_something_else_or_keeps_no_state_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.Adam(other.parameters())
    with unbroken.Run(tmp_path, model=model) as run:
        train(model, plain)
        train(other, inner)
        run.step()
    assert "not kept" not in capsys.readouterr().err
