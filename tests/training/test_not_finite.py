"""A state that blew up is kept as evidence; nothing goes on from it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore, newest_verified
from unbroken.errors import NotFiniteError, UsageError
from unbroken.rundir.journal import read_events

from .runs import names


def parts(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **more}


def blow_up(model: nn.Module, value: float = math.nan) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] = value


def save_at(directory: Path, *bad_steps: int, steps: int, **keywords: Any) -> None:
    """Save at every step up to `steps`, the weights of `bad_steps` not finite."""
    live = parts()
    with unbroken.Run(directory, save=[unbroken.EverySteps(1)], **keywords, **live) as run:
        while run.step_count < steps:
            blow_up(live["model"], math.nan if run.step_count + 1 in bad_steps else 0.5)
            run.step()


def test_the_manifest_names_what_is_not_finite_and_how_much_of_it(tmp_path: Path) -> None:
    save_at(tmp_path, 2, steps=2, keep=[])
    store = CheckpointStore(tmp_path)
    assert [store.get(name).manifest.non_finite for name in names(tmp_path)[:2]] == [{}, {"model/weight": 1}]


def test_a_large_state_is_looked_through_by_the_process_that_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"][:, 7] = math.inf
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
        run.step()
    (manifest,) = (CheckpointStore(tmp_path).get(name).manifest for name in names(tmp_path))
    assert manifest.non_finite == {"optimizer/state/model.weight/exp_avg": 600}


def test_a_run_goes_on_from_the_newest_that_is_finite_and_sets_the_others_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_at(tmp_path, 3, 4, steps=4, keep=[])
    assert "step-00000003 holds NaN or infinity in model.weight (1 of its numbers)" in capsys.readouterr().err
    with unbroken.Run(tmp_path, keep=[], **parts()) as run:
        assert run.step_count == 2
        assert run.restored is not None
        passed_over = run.restored.as_json()["passed_over"]
        assert "not finite: NaN or infinity in model.weight" in passed_over["step-00000003"]
        run.step()
    assert {path.name for path in (tmp_path / "quarantine").iterdir()} >= {"step-00000003", "step-00000004"}


def test_latest_stays_at_what_can_be_gone_on_from(tmp_path: Path) -> None:
    save_at(tmp_path, 3, steps=3, keep=[])
    assert (tmp_path / "latest").resolve().name == "step-00000002"
    assert newest_verified(tmp_path) == "step-00000002"


def test_the_journal_says_which_tensors(tmp_path: Path) -> None:
    save_at(tmp_path, 2, steps=2)
    events = read_events(next(tmp_path.glob("attempts/*/events-rank0.jsonl")))
    (found,) = {event["checkpoint"]: event for event in events if event["kind"] == "not-finite"}.values()
    assert found["found"] == "NaN or infinity in model.weight (1 of its numbers)"


def test_retention_never_deletes_the_newest_that_is_finite(tmp_path: Path) -> None:
    save_at(tmp_path, *range(4, 9), steps=8, keep=[unbroken.KeepLast(2)])
    # Nor those that count as the last two; of the others the newest is evidence enough.
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000008"]


def test_where_none_is_finite_a_run_never_begins_anew_by_itself(tmp_path: Path) -> None:
    save_at(tmp_path, 1, 2, steps=2)
    for resume in ("auto", "must"):
        with pytest.raises(NotFiniteError, match="2 that are not finite") as caught:
            unbroken.Run(tmp_path, resume=resume, **parts()).__enter__()
        assert caught.value.exit_code == 78
    with unbroken.Run(tmp_path, resume="step-00000002", **parts()) as run:
        assert run.step_count == 2


def test_what_is_not_trained_may_be_anything(tmp_path: Path) -> None:
    live = parts()
    live["model"].register_buffer("mask", torch.full((2, 2), -math.inf))
    live["model"].bias.requires_grad_(False)
    blow_up(live["model"], 0.5)
    with torch.no_grad():
        live["model"].bias[0] = math.nan
    with unbroken.Run(tmp_path, **live, best={"loss": torch.tensor(math.inf)}) as run:
        run.step()
    assert CheckpointStore(tmp_path).latest().manifest.non_finite == {}


def test_the_statistics_of_a_module_must_stay_finite(tmp_path: Path) -> None:
    live = parts()
    live["norm"] = nn.BatchNorm1d(2)
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], **live) as run:
        for value in (1.0, math.nan):
            live["norm"](torch.full((4, 2), value))
            run.step()
    found = CheckpointStore(tmp_path).get("step-00000002").manifest.non_finite
    assert found == {"norm/running_mean": 2, "norm/running_var": 2}
    with unbroken.Run(tmp_path, **(live | parts() | {"norm": nn.BatchNorm1d(2)})) as run:
        assert run.step_count == 1


def test_a_trained_tensor_may_be_if_it_is_named(tmp_path: Path) -> None:
    live = parts()
    blow_up(live["model"], -math.inf)
    with unbroken.Run(tmp_path, non_finite=["model.weight"], **live) as run:
        run.step()
    assert CheckpointStore(tmp_path).latest().manifest.non_finite == {}


def test_naming_it_later_lets_a_marked_checkpoint_be_resumed_from(tmp_path: Path) -> None:
    save_at(tmp_path, 1, 2, steps=2)
    with unbroken.Run(tmp_path, non_finite=["model.weight"], **parts()) as run:
        assert run.step_count == 2


def test_a_warm_start_takes_the_newest_that_is_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_at(tmp_path, 2, steps=2, keep=[])
    live = parts()
    unbroken.warm_start(live["model"], tmp_path)
    assert live["model"].weight.isfinite().all()
    assert "step-00000001 is taken" in capsys.readouterr().err


def test_a_warm_start_from_a_run_without_a_finite_one_is_refused(tmp_path: Path) -> None:
    save_at(tmp_path, 1, steps=1)
    with pytest.raises(NotFiniteError, match="none that is good; step-00000001 is not finite: NaN"):
        unbroken.warm_start(parts()["model"], tmp_path)


def test_going_on_from_one_by_name_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_at(tmp_path, 2, steps=2)
    with unbroken.Run(tmp_path, resume="step-00000002", **parts()):
        pass
    assert "step-00000002 holds NaN or infinity in model.weight" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["model/weight", "model.wieght", "weight"])
def test_a_name_that_stands_for_no_tensor_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match="expected non_finite= to name tensors"):
        unbroken.Run(tmp_path, non_finite=[pattern], **parts()).__enter__()


def test_a_tied_weight_may_be_named_by_any_of_its_names(tmp_path: Path) -> None:
    live = parts()
    other = nn.Linear(3, 2)
    other.weight = live["model"].weight
    blow_up(live["model"], math.inf)
    with unbroken.Run(tmp_path, non_finite=["other.weight"], other=other, **live) as run:
        run.step()
    assert CheckpointStore(tmp_path).latest().manifest.non_finite == {}


SCRIPT = """
import os, signal, sys
import torch
import unbroken

torch.set_num_threads(1)
model = torch.nn.Linear(3, 2)
with unbroken.Run(sys.argv[1], save=[], snapshot=[unbroken.EverySteps(1)], model=model) as run:
    run.step()
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    for _ in run.epochs(1):
        for _ in run.batches([1, 2]):
            run.step()
            if run.step_count == 3:
                run.save()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_writer_saves_after_a_death_is_no_better(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    with pytest.raises(NotFiniteError):
        unbroken.Run(tmp_path / "run", model=nn.Linear(3, 2)).__enter__()
    events = [*read_events(next(tmp_path.glob("run/attempts/0001/events-rank0.jsonl")))]
    assert any(event["kind"] == "not-finite" for event in events)
    assert not (tmp_path / "run/latest").exists()
