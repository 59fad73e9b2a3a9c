"""Settings of the script that win on request: once, for each group, and never without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import unbroken
from unbroken.checkpoint.store import CheckpointStore

from ..some import named, some

MakeScheduler = Callable[[Any], Any]

SCHEDULERS: dict[str, MakeScheduler] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        [3],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def built(rate: Any, make: MakeScheduler | None = None) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    return parts | ({"scheduler": make(optimizer)} if make else {})


def rates(directory: Path, parts: dict[str, Any], count: int, **options: Any) -> list[float]:
    """Train for `count` steps and return the rates that were in force."""
    optimizer, scheduler = parts["optimizer"], parts.get("scheduler")
    found = []
    with unbroken.Run(directory, **parts, **options) as run:
        for _ in range(count):
            found.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            parts["model"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            elif scheduler is not None:
                scheduler.step()
            run.step()
    return found


def lines(directory: Path, parts: dict[str, Any], **options: Any) -> list[str]:
    with unbroken.Run(directory, **parts, **options) as run:
        assert run.restored is not None
        return list(run.restored.changed)


@pytest.mark.parametrize(
    ("name", "as_tensor"), some(named(SCHEDULERS), {"number": False, "tensor": True}, one_in=2)
)
def test_another_base_rate_with_a_schedule_gives_the_rates_of_a_run_that_began_with_it(
    tmp_path: Path, name: str, as_tensor: bool
) -> None:
    make = SCHEDULERS[name]
    kind = torch.tensor if as_tensor else float
    expected = rates(tmp_path / "other", built(kind(0.2), make), 9)
    rates(tmp_path / "run", built(kind(0.1), make), 3)
    override = ["optimizer.lr"]
    found = rates(tmp_path / "run", built(kind(0.2), make), 3, override=override)
    found += rates(tmp_path / "run", built(kind(0.2), make), 3, override=override)
    assert found == pytest.approx(expected[3:])


def test_each_group_is_overridden_once(tmp_path: Path) -> None:
    found = []
    for scale in (1.0, 2.0, 2.0):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [
            {"params": model[0].parameters(), "lr": 0.25 * scale},
            {"params": model[1].parameters(), "lr": 0.125 * scale},
        ]
        optimizer = torch.optim.SGD(groups)
        with unbroken.Run(tmp_path, model=model, optimizer=optimizer, override=["optimizer.lr"]) as run:
            found.append([group["lr"] for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                group["lr"] /= 2
            run.step()
    assert found == [[0.25, 0.125], [0.5, 0.25], [0.25, 0.125]]


def test_what_a_run_began_with_is_not_put_back_at_its_first_restart(tmp_path: Path) -> None:
    found = []
    for _ in range(3):
        parts = built(0.5)
        with unbroken.Run(tmp_path, **parts, override=["optimizer.lr"]) as run:
            found.append(parts["optimizer"].param_groups[0]["lr"])
            parts["optimizer"].param_groups[0]["lr"] /= 2
            run.step()
    assert found == [0.5, 0.25, 0.125]


def test_a_plateau_goes_on_from_the_overridden_rate_and_is_not_undone(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    assert rates(tmp_path, built(0.1, plateau), 4)[-1] == 0.05
    first = built(0.8, plateau)
    assert lines(tmp_path, first) == []
    assert first["scheduler"].get_last_lr() == [0.05]
    found = rates(tmp_path, built(0.8, plateau), 3, override=["optimizer.lr"])
    found += rates(tmp_path, built(0.8, plateau), 1, override=["optimizer.lr"])
    assert found[0] == 0.8
    assert found[-1] < 0.8


def test_a_name_that_stands_for_nothing_is_told_once(tmp_path: Path) -> None:
    rates(tmp_path, built(0.1), 1)
    options: dict[str, Any] = {"override": ["optimiser.lr"], "rename": {"modell": "model"}}
    said = lines(tmp_path, built(0.1), **options)
    assert any("'modell' of rename= changes no name in the checkpoint" in line for line in said)
    assert any("'optimiser.lr' of override= stands for no setting; there are " in line for line in said)
    rates(tmp_path, built(0.1), 1, **options)
    assert lines(tmp_path, built(0.1), **options) == []


def test_the_rate_of_an_optimizer_whose_schedule_takes_no_notice_of_it_is_told_to_be_no_setting(
    tmp_path: Path,
) -> None:
    def one_cycle(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)

    rates(tmp_path, built(0.1, one_cycle), 2)
    said = lines(tmp_path, built(0.2, one_cycle), override=["optimizer.lr"])
    assert len(said) == 1
    assert "'optimizer.lr' of override= stands for no setting" in said[0]
    assert "optimizer.max_lr" in said[0]


def test_a_name_that_fits_a_setting_which_has_not_changed_is_no_slip(tmp_path: Path) -> None:
    rates(tmp_path, built(0.1), 1)
    assert lines(tmp_path, built(0.1), override=["optimizer.lr", "*.weight_decay"]) == []


def test_a_flavour_of_the_script_does_not_hide_that_something_else_was_not_restored(tmp_path: Path) -> None:
    class Deaf(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            for group in self.param_groups:
                group["weight_decay"] = 0.75

    def build(*, foreach: bool) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": Deaf(model.parameters(), lr=0.1, foreach=foreach)}

    with unbroken.Run(tmp_path, **build(foreach=False)) as run:
        run.step()
    with pytest.raises(unbroken.UnbrokenError, match="differs at optimizer/groups/0/options/weight_decay"):
        lines(tmp_path, build(foreach=True))


def test_notes_are_of_parts_and_groups(tmp_path: Path) -> None:
    rates(tmp_path, built(0.1), 1, override=["optimizer.lr"])
    assert CheckpointStore(tmp_path).latest().manifest.choices == {
        "override": {"optimizer.group 0.lr": "0.1"}
    }


def test_a_rate_that_is_set_after_entering_is_put_back_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates(tmp_path, built(0.1), 2)
    capsys.readouterr()

    def attempt(rate: float) -> str:
        parts = built(0.1)
        with unbroken.Run(tmp_path, **parts) as run:
            parts["optimizer"].param_groups[0]["lr"] = rate
            for _ in run.epochs(1):
                assert parts["optimizer"].param_groups[0]["lr"] == 0.1
                break
        return capsys.readouterr().err

    told = "the learning rate was set to 0.3 after the run was entered, and is put back to 0.1"
    assert told in attempt(0.3)
    assert "is put back" not in attempt(0.1)
