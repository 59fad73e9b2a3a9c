"""What a run goes back to and what it does not, how often, and what becomes of the rest."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken import Health
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UnhealthyError
from unbroken.rundir.rollbacks import Rollback, Window, add_rollback, read_rollbacks
from unbroken.training.preemption import StopRequested

from .rolled_back import SIZE, events, history, quarantined, train, train_on
from .runs import flip, names


def once(step: int, change: Any) -> Any:
    """Return a trouble: `change(model, loss)`, when that step is reached first; it may return a loss."""
    left = {step}

    def trouble(model: nn.Module, at: int, loss: torch.Tensor) -> torch.Tensor:
        if at not in left:
            return loss
        left.remove(at)
        with torch.no_grad():
            found = change(model, loss)
        return loss if found is None else found

    return trouble


def test_a_weight_that_is_nan_is_gone_back_behind_and_its_checkpoint_never_chosen(tmp_path: Path) -> None:
    # Saved at 6, before the loss of step 7 shows it.
    train(tmp_path, epochs=1, trouble=once(6, lambda model, _: fill(model[0].weight, math.nan)))
    (back,) = events(tmp_path, "rolled-back")
    assert (back["found_step"], back["checkpoint"], back["tainted"]) == (
        7,
        "step-00000003",
        ["step-00000006"],
    )
    assert quarantined(tmp_path)["step-00000006"].startswith("not finite: ")
    assert all(math.isfinite(float(metrics["loss"])) for _, metrics in history(tmp_path).values())


def test_a_corrupted_but_finite_checkpoint_is_found_out_by_going_back_to_it(tmp_path: Path) -> None:
    # The next loss overflows, whatever the data.
    def corrupt(model: nn.Sequential, _: torch.Tensor) -> None:
        model[-1].bias.copy_(torch.tensor([-3e38, -3e38, 3e38]))

    train(tmp_path, epochs=1, trouble=once(6, corrupt))
    first, second = events(tmp_path, "rolled-back")
    assert (first["checkpoint"], second["checkpoint"]) == ("step-00000006", "step-00000003")
    assert second["tainted"] == ["step-00000006"]
    assert quarantined(tmp_path)["step-00000006"].startswith("tainted: the run went back to step 3, loss inf")
    assert [one.in_a_row for one in read_rollbacks(tmp_path)] == [1, 2]
    # Wider on both sides the second time; the first window holds still.
    assert [(one.first, one.last) for entry in read_rollbacks(tmp_path) for one in entry.windows] == [
        (6, 6),
        (5, 5),
        (7, 8),
    ]


def test_a_damaged_checkpoint_goes_to_quarantine_and_the_next_older_one_is_taken(tmp_path: Path) -> None:
    def damage(_: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        flip(next((tmp_path / "checkpoints/step-00000003").glob("*.safetensors")))
        return loss * math.nan

    train(tmp_path, epochs=1, trouble=once(5, damage), background=False)
    assert [event["checkpoint"] for event in events(tmp_path, "rolled-back")] == ["step-00000000"]
    assert "are not those that were saved" in quarantined(tmp_path)["step-00000003"]


def nan_from(first_step: int) -> Any:
    return lambda _, step, loss: loss * math.nan if step >= first_step else loss


def test_what_going_back_does_not_help_against_stops_the_run_for_a_human(tmp_path: Path) -> None:
    with pytest.raises(UnhealthyError) as stopped:
        train(tmp_path, epochs=1, save_every=1, trouble=nan_from(3), health=Health(max_rollbacks=2))
    assert stopped.value.exit_code == 78
    assert "loss nan at step 3" in stopped.value.message
    assert "rolled back 2 times in a row already (found at step 3, 3)" in stopped.value.message
    assert "raise max_rollbacks" in (stopped.value.hint or "")
    assert [event["checkpoint"] for event in events(tmp_path, "rolled-back")] == [
        "step-00000002",
        "step-00000001",
    ]


def test_to_stop_is_to_save_and_end_and_to_warn_is_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(UnhealthyError, match=r"loss nan at step 5.*; the state is saved in step-00000005"):
        train(tmp_path / "stop", epochs=1, trouble=nan_from(5), health=Health(action="stop"))
    assert names(tmp_path / "stop")[-1] == "step-00000005"
    train(tmp_path / "warn", epochs=1, trouble=nan_from(8), health=Health(action="warn"))
    (alarm,) = events(tmp_path / "warn", "alarm")
    assert (alarm["what"], alarm["text"].startswith("loss nan at step 8")) == ("non-finite", True)
    assert events(tmp_path / "warn", "rolled-back") == []
    assert names(tmp_path / "warn")[0] == "step-00000003", "a run that never goes back saves nothing at first"


def test_copies_in_memory_of_what_was_given_up_never_become_checkpoints(tmp_path: Path) -> None:
    def trouble(model: nn.Module, step: int, loss: torch.Tensor) -> torch.Tensor:
        if not read_rollbacks(tmp_path):
            return loss * math.nan if step == 6 else loss
        raise InterruptedError("right after going back")

    options: dict[str, Any] = {"save_every": 100, "snapshot": [unbroken.EverySteps(1)], "epochs": 1}
    with pytest.raises(InterruptedError):
        train(tmp_path, trouble=trouble, **options)
    # The copies of steps 1 to 5 were newer than the checkpoint of step 0, which was gone back to.
    assert names(tmp_path) == ["step-00000000"]
    assert (tmp_path / "latest").resolve().name == "step-00000000"


def test_steps_outside_loops_over_batches_go_back_by_another_process(tmp_path: Path) -> None:
    def attempt(bad: set[int]) -> list[int]:
        model = nn.Linear(2, 1)
        done = []
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(2)], health=Health(), model=model) as run:
            while run.step_count < 8:
                done.append(run.step_count + 1)
                run.step(loss=math.nan if run.step_count + 1 in bad else 1.0)
        return done

    with pytest.raises(StopRequested):
        attempt({5})
    assert attempt(set()) == [5, 6, 7, 8]
    assert read_rollbacks(tmp_path)[0].windows == ()


def test_a_run_without_any_checkpoint_begins_anew_and_leaves_the_bad_steps_out(tmp_path: Path) -> None:
    seen = []

    def attempt(bad: float) -> None:
        model = nn.Linear(2, 1)
        with unbroken.Run(tmp_path, health=Health(), resume="auto", model=model) as run:
            for _ in range(4):
                seen.append(run.step_count + 1)
                run.step(loss=bad if run.step_count == 2 else 1.0)

    with pytest.raises(StopRequested):
        attempt(math.nan)
    assert names(tmp_path) == []
    attempt(1.0)
    assert seen == [1, 2, 3, 1, 2, 3, 4]


def fill(tensor: torch.Tensor, value: float) -> None:
    tensor[0, 0] = value


def rolled_back(directory: Path, trusted_step: int, *windows: Window) -> None:
    rollback = Rollback(
        decided_by="supervisor",
        reason="a test",
        attempt=1,
        found_step=9,
        trusted_step=trusted_step,
        windows=windows,
    )
    add_rollback(directory, rollback)


def test_the_record_alone_decides_what_the_next_start_goes_on_from(tmp_path: Path) -> None:
    train(tmp_path, "ordered", epochs=1)
    rolled_back(tmp_path, 4, Window(epoch=0, pass_index=0, first=5, last=6))
    seen = train(tmp_path, "ordered", epochs=1)
    assert [samples[0] // SIZE for samples in seen] == [3, 4, 7]
    assert {*quarantined(tmp_path)} == {"step-00000006", "step-00000008"}
    assert CheckpointStore(tmp_path).latest().manifest.rollbacks == 1
    # Once more: what was written since is not tainted.
    assert train(tmp_path, "ordered", epochs=1) == []


def test_a_tainted_checkpoint_is_gone_on_from_by_its_name_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "ordered", epochs=1)
    rolled_back(tmp_path, 4)
    seen = train(tmp_path, "ordered", epochs=1, resume="step-00000006")
    assert [samples[0] // SIZE for samples in seen] == [6, 7]
    assert "step-00000006 is tainted: the run went back to step 4, a test" in capsys.readouterr().err


def test_a_run_with_nothing_but_tainted_checkpoints_begins_anew_only_if_it_went_back_so_far(
    tmp_path: Path,
) -> None:
    late, beginning, damaged = (tmp_path / name for name in ("late", "beginning", "damaged"))
    train(late, "ordered", epochs=1, health=Health(action="warn"))
    for directory in (beginning, damaged):
        shutil.copytree(late, directory, symlinks=True)
    rolled_back(late, 1)
    with pytest.raises(UnhealthyError, match="expected a checkpoint to go on from, found 3"):
        train(late, "ordered", epochs=1, health=Health(action="warn"))
    rolled_back(beginning, 0)
    # Given up by somebody's choice, not for what it is.
    aside = CheckpointStore(beginning)
    aside.quarantine(aside.names()[-1], "set aside: the run was continued from step-00000006 on request")
    assert len(train(beginning, "ordered", epochs=1, health=Health(action="warn"))) == 8
    rolled_back(damaged, 0)
    CheckpointStore(damaged).quarantine("step-00000003", "a digest differs")
    with pytest.raises(UnhealthyError):
        train(damaged, "ordered", epochs=1)


@pytest.mark.chaos
def test_a_spike_that_recurs_with_its_data_is_got_past(tmp_path: Path) -> None:
    # Three batches in a row, in each epoch from the sixth on.
    spikes = [number * SIZE for number in (3, 4, 5)]
    train_on(tmp_path, "ordered", epochs=7, health=Health(warm_up_steps=10), spikes=spikes)
    assert events(tmp_path, "rolled-back")[0]["reason"].startswith("loss ")
    losses = [float(metrics["loss"]) for _, metrics in history(tmp_path).values()]
    assert max(losses) < 5 * sorted(losses)[len(losses) // 2]
    left_out = {
        (one.epoch, number)
        for entry in read_rollbacks(tmp_path)
        for one in entry.windows
        for number in range(one.first, one.last + 1)
    }
    assert left_out >= {(epoch, number) for epoch in (5, 6) for number in (3, 4, 5)}
