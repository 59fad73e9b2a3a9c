"""A scheduler and its optimizer of which only one is restored go by one rate, and it is said which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import unbroken

from ..some import named, some
from .test_overrides import SCHEDULERS, built, lines, rates

MakeScheduler = Callable[[Any], Any]


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)


def with_adam(rate: float, make: MakeScheduler) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}


@pytest.mark.parametrize("name", [*SCHEDULERS, "one cycle"])
def test_an_optimizer_that_begins_anew_goes_on_where_its_schedule_is(tmp_path: Path, name: str) -> None:
    make = {**SCHEDULERS, "one cycle": one_cycle}[name]
    expected = rates(tmp_path / "whole", built(0.1, make), 9)
    rates(tmp_path / "run", built(0.1, make), 3)
    found = rates(tmp_path / "run", with_adam(0.1, make), 3, fresh=["optimizer"])
    found += rates(tmp_path / "run", with_adam(0.1, make), 3, fresh=["optimizer"])
    assert found == expected[3:]


def test_one_with_a_rate_of_its_own_goes_by_the_same_curve_from_there(tmp_path: Path) -> None:
    make = SCHEDULERS["steps"]
    expected = rates(tmp_path / "other", built(0.001, make), 6)
    rates(tmp_path / "run", built(0.1, make), 3)
    parts = with_adam(0.001, make)
    with unbroken.Run(tmp_path / "run", **parts, fresh=["optimizer"]) as run:
        assert run.restored is not None
        assert any("from 0.001 of the script" in line for line in run.restored.changed)
        assert run.restored.as_json()["learning_rates"]["in_force"] == pytest.approx(expected[3:4])
        assert parts["scheduler"].get_last_lr() == pytest.approx(expected[3:4])
        run.step()
    assert rates(tmp_path / "run", with_adam(0.001, make), 3) == pytest.approx(expected[3:])


@pytest.mark.parametrize(
    ("name", "choice"), some(named([*SCHEDULERS, "one cycle"]), named(["fresh", "allow"]), one_in=2)
)
def test_a_schedule_that_begins_anew_begins_with_the_rates_of_the_script(
    tmp_path: Path, name: str, choice: str
) -> None:
    make = {**SCHEDULERS, "one cycle": one_cycle}[name]
    expected = rates(tmp_path / "whole", built(0.2, make), 4)
    before = None if choice == "allow" else lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates(tmp_path / "run", built(0.1, before), 3)
    parts = built(0.2, make)
    assert rates(tmp_path / "run", parts, 4, **{choice: ["scheduler"]}) == expected
    assert lines(tmp_path / "run", built(0.2, make)) == []


def test_no_momentum_of_another_schedule_stays(tmp_path: Path) -> None:
    rates(tmp_path, built(0.1, one_cycle), 4)
    parts = built(0.1, SCHEDULERS["cosine"])
    said = lines(tmp_path, parts, fresh=["scheduler"])
    group = parts["optimizer"].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert "max_momentum" not in group
    assert any("momentum: 0.9, as the schedule begins anew" in line for line in said)


def test_a_schedule_that_only_reduces_goes_on_from_the_rate_that_it_finds(tmp_path: Path) -> None:
    rates(tmp_path, built(0.1, SCHEDULERS["steps"]), 3)
    parts = built(0.1, lr_scheduler.ReduceLROnPlateau)
    lines(tmp_path, parts, fresh=["scheduler"])
    assert parts["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)
    assert parts["scheduler"].get_last_lr() == pytest.approx([0.01])
