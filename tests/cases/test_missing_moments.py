"""Weights went on and the optimizer's moments did not: two checkpoints beside one another show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import unbroken
from unbroken.cli.main import main

from .scenes import train


def save(directory: Path, *, with_optimizer: bool) -> Path:
    """Train a little and save, with or without the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(3))
    parts = {"optimizer": optimizer} if with_optimizer else {}
    # What is trained here is over before the run begins, which is how the mistake goes unnoticed.
    with unbroken.Run(directory, model=model, **parts) as run:
        run.step()
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return save(tmp_path / "whole", with_optimizer=True), save(tmp_path / "weights", with_optimizer=False)


def test_diff_shows_that_the_moments_are_lost_before_anything_else(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *map(str, runs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "optimizer state (optimizer) is in A and not in B: moments lost (momentum_buffer of 2 parameters)"
    )
    assert not any("model/" in line for line in lines), "the weights are the same"


def test_a_program_is_told_in_the_same_way(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs[1]), str(runs[0]), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(lost["part"], lost["present"], lost["is_whole"]) for lost in found["lost"]] == [
        ("optimizer", "B", True)
    ]
    assert found["changed"] == []


def test_moments_that_were_reset_are_lost_though_the_optimizer_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    fresh = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.save({"model": model.state_dict(), "optimizer": fresh.state_dict()}, tmp_path / "b.pt")
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    assert "of 2 parameters in A and of 0 in B: moments lost" in capsys.readouterr().out
