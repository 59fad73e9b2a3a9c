from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.cli.main import main

from .golden import GOLDEN


def advice_on(target: Path, capsys: pytest.CaptureFixture[str], code: int) -> list[dict[str, str]]:
    assert main(["doctor", str(target), "--json"]) == code
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["advice"]
    return found


def texts(found: list[dict[str, str]], severity: str) -> list[str]:
    return [one["text"] for one in found if one["severity"] == severity]


def parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
    }


def test_nothing_is_in_the_way_of_a_run_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unbroken.Run(tmp_path / "run", **parts()) as run:
        run.step()
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert "nothing is in the way: training can go on from it exactly" in capsys.readouterr().out


def test_a_shard_that_is_gone_or_short_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unbroken.Run(tmp_path / "run", **parts()) as run:
        run.step()
    shards = sorted((tmp_path / "run/checkpoints").glob("step-*/*.safetensors"))
    data = shards[0].read_bytes()
    shards[0].unlink()
    assert main(["doctor", str(tmp_path / "run")]) == 3
    assert f"{shards[0].name}: this file is missing" in capsys.readouterr().out
    shards[0].write_bytes(data[:-1])
    (advice,) = [one for one in advice_on(tmp_path / "run", capsys, 3) if one["severity"] == "error"]
    assert advice["evidence"].startswith(f"{shards[0].name}: expected {len(data)} bytes")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "x.safetensors")]) == 2


def test_a_number_of_processes_that_says_nothing_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unbroken.Run(tmp_path / "run", **parts()) as run:
        run.step()
    assert main(["doctor", str(tmp_path / "run"), "--world-size", "2"]) == 0
    assert "note: it does not say for how many processes it is" in capsys.readouterr().out


def test_a_file_of_weights_alone_is_nothing_to_train_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "weights.pt")
    found = advice_on(tmp_path / "weights.pt", capsys, 1)
    assert texts(found, "error") == [
        "it holds no optimizer: training goes on with moments and rates begun anew"
    ]
    assert [one["severity"] for one in found] == sorted(
        (one["severity"] for one in found), key=["error", "warning", "note"].index
    )


def test_lost_moments_and_missing_randomness_and_position_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = parts()
    optimizer = torch.optim.Adam(live["model"].parameters())
    content = {"model": live["model"].state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(content, tmp_path / "checkpoint.pt")
    found = advice_on(tmp_path / "checkpoint.pt", capsys, 0)
    assert texts(found, "warning") == [
        "optimizer optimizer has no moments",
        "it holds no random generators: order, dropout and augmentation go on otherwise",
        "it does not say which samples of the epoch were seen",
    ]
    assert texts(found, "note") == ["it holds no scheduler of the learning rate"]


def test_prefixes_of_wrappers_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module.weight": torch.ones(2)}, tmp_path / "wrapped.pt")
    assert "names have the prefix module. of a wrapper" in texts(
        advice_on(tmp_path / "wrapped.pt", capsys, 1), "note"
    )


def test_a_state_that_is_not_finite_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = parts()
    with torch.no_grad():
        live["model"].weight[0, 0] = torch.nan
    with unbroken.Run(tmp_path / "run", **live) as run:
        run.step()
    (advice,) = [one for one in advice_on(tmp_path / "run", capsys, 1) if one["severity"] == "error"]
    assert advice["evidence"] == "model/weight: 1 numbers"


def test_a_file_that_is_cut_off_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = next(path for path in sorted(GOLDEN.iterdir()) if path.suffix == ".safetensors")
    (tmp_path / "cut.safetensors").write_bytes(source.read_bytes()[:-1])
    assert main(["doctor", str(tmp_path / "cut.safetensors")]) == 3
    assert "error: it is not whole" in capsys.readouterr().out
