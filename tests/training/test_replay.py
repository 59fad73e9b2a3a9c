"""Why a step was bad: it is done again on its own batch, and the report names samples and module."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from unbroken.errors import UsageError
from unbroken.training.health import replaying

from .replayed import FEW, SIZE, SPOILED, Batch, Masking, Noisy, Training


@pytest.fixture(autouse=True)
def _outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Git takes longer to compare one than such a training lasts.
    monkeypatch.chdir(tmp_path)


def test_the_same_bad_loss_is_of_the_data_and_the_sample_is_named(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run(training.step)

    found = training.replayed()
    (gone_back,) = training.events("rolled-back")
    assert found["bad_step"] == found["found_step"] == gone_back["found_step"]
    assert (found["recorded"], found["replayed"], found["same"]) == ("nan", "nan", True)
    assert found["compared_steps"] == found["equal_steps"] == found["bad_step"] - gone_back["step"]
    assert (found["first_difference"], found["bad_samples"], found["ended_by"]) == (None, [SPOILED], "")
    assert SPOILED in found["samples"]
    (skipped,) = training.events("skipped")
    assert skipped["samples"] == [found["samples"]]
    assert (found["module"], found["are_inputs_finite"], found["are_weights_finite"]) == (
        "model.0",
        False,
        True,
    )
    text = training.alarm("replay")
    assert "the data or the optimization is the cause" in text
    assert text.endswith(
        "that of model.0 (Linear), whose input was not finite already. "
        f"Not finite in the batch: samples {SPOILED}"
    )


def test_another_loss_is_of_the_hardware(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=())
    calls = iter(range(1000))

    def break_once(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * float("inf") if next(calls) == 7 else None

    training.model[1].register_forward_hook(break_once)
    training.run(training.step)

    found = training.replayed()
    assert (found["bad_step"], found["checkpoint"], found["module"]) == (8, "step-00000005", None)
    assert (found["same"], found["equal_steps"], found["bad_samples"]) == (False, 2, [])
    assert (found["first_difference"]["step"], found["strays"]) == (8, None)
    assert "the 2 steps before it came out as recorded, which points to the hardware" in training.alarm(
        "replay"
    )
    assert "The batch: samples " in training.alarm("replay")


def test_a_step_function_that_does_less_than_the_loop_does_not_make_the_hardware_guilty(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path, spoiled=())
    calls = iter(range(1000))
    training.model[1].register_forward_hook(
        lambda _module, _inputs, output: output * float("inf") if next(calls) == 7 else None
    )

    def without_momentum(batch: Batch) -> torch.Tensor:
        training.optimizer.state.clear()
        return training.step(batch)

    training.run(without_momentum)

    found = training.replayed()
    assert (found["same"], found["strays"]["step"]) == (False, 7)
    assert "neither is step 7 before it, which was well" in training.alarm("replay")
    assert "the function given as replay= does not do what the loop does" in training.alarm("replay")


def test_a_spike_is_as_bad_again_whatever_its_height(tmp_path: Path) -> None:
    training = Training(tmp_path, by=1e4)
    training.loader = DataLoader(training.loader.dataset, SIZE)
    training.actions = {"warm_up_steps": 5}

    def without_momentum(batch: Batch) -> torch.Tensor:
        training.optimizer.state.clear()
        return training.step(batch)

    training.run(without_momentum)

    found = training.replayed()
    assert abs(found["recorded"] - found["replayed"]) > 0.1 * found["recorded"]
    assert found["same"] is True
    assert SPOILED in found["samples"]


def test_a_step_that_the_loop_leaves_out_again_is_as_bad_again(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=(5,), samples=FEW, by=-9.0)
    training.loader = DataLoader(training.loader.dataset, SIZE)
    norms: list[float] = []

    def step(batch: Batch) -> torch.Tensor:
        rows, wanted = batch
        loss = nn.functional.mse_loss(training.model(rows), wanted)
        loss.backward()
        is_bad = bool((rows < -8).any())
        norms.append(float("nan") if is_bad else 1.0)
        if not is_bad:
            training.optimizer.step()
        training.optimizer.zero_grad()
        return loss

    training.reported = lambda loss: {"loss": loss, "grad_norm": norms[-1]}
    training.step = step  # type: ignore[method-assign]
    training.run(step)

    found = training.replayed()
    assert (found["bad_step"], found["same"], found["bad_tensors"]) == (2, True, [])
    assert "No optimizer stepped" in training.alarm("replay")


@pytest.mark.parametrize("breaks_again", [False, True])
def test_a_gradient_that_is_not_finite_decides_where_the_loss_is_well(
    tmp_path: Path, breaks_again: bool
) -> None:
    training = Training(tmp_path, spoiled=())
    # What belongs there is not blamed.
    training.model[3] = nn.Sequential(Masking(), nn.Softmax(-1), nn.Linear(4, 1))
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=0.01)
    weight: Any = training.model[0].weight
    calls = iter(range(1000))
    # The replay from step 5 does steps 6 to 8 again.
    broken = (7, 10) if breaks_again else (7,)
    weight.register_hook(lambda gradient: gradient / 0 if next(calls) in broken else None)
    training.reported = lambda loss: {"loss": loss, "grad_norm": weight.grad.norm()}
    training.run(training.step)

    found = training.replayed()
    assert (found["bad_step"], found["compared_steps"], found["equal_steps"]) == (8, 3, 3)
    assert found["same"] is bool(found["bad_tensors"]) is breaks_again
    assert found["module"] is None
    text = training.alarm("replay")
    assert ("The output of every module is well; not finite: model.0.weight" in text) is breaks_again
    assert ("is finite this time" in text) is not breaks_again


@pytest.mark.parametrize(
    "kind", ["plain", "list", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("keyed", "workers"))]
)
def test_the_run_goes_on_as_without_a_replay(tmp_path: Path, kind: str) -> None:
    options = {"randomness": "keyed"} if kind == "keyed" else {}
    with_replay, without = (
        Training(tmp_path / name, workers=2 if kind == "workers" else 0) for name in ("with", "without")
    )
    if kind == "list":
        with_replay.loader = without.loader = list(with_replay.loader)
    with_replay.run(with_replay.step, **options)
    without.run(None, **options)

    assert with_replay.replayed()["equal_steps"] == with_replay.replayed()["compared_steps"]
    assert with_replay.curve() == without.curve()
    assert with_replay.opened.went_on_from == without.opened.went_on_from
    assert all(
        torch.equal(one, other)
        for one, other in zip(with_replay.model.parameters(), without.model.parameters(), strict=True)
    )
    stored = [
        unbroken.CheckpointStore(training.directory).latest().manifest.tensors
        for training in (with_replay, without)
    ]
    assert [one.digest for one in stored[0].values()] == [one.digest for one in stored[1].values()]
    assert without.events("replayed") == []


def test_without_a_step_function_the_samples_and_the_first_bad_tensor_are_named(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run(None)

    (gone_back,) = training.events("rolled-back")
    (skipped,) = training.events("skipped")
    names = ", ".join(map(str, skipped["samples"][0]))
    assert f"(samples {names}; not finite now: model.0.weight and 11 more tensors)" in gone_back["reason"]


def test_a_model_that_left_out_the_bad_step_is_said_to_be_finite_and_so_is_that_it_is_over(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path)
    training.actions = {"non_finite": "warn"}
    training.model.register_buffer("mask", torch.full((2,), -float("inf")))
    training.optimizer.register_step_pre_hook(lambda *_: training.model.zero_grad(set_to_none=True))
    training.run(None)

    found, over = training.alarm("non-finite"), training.alarm("over")
    assert f"{SPOILED}" in found
    assert found.endswith("; the model itself is finite)")
    assert "finite again" in over
    assert "samples" not in over


def test_batches_that_were_left_out_before_are_so_in_a_replay(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=(SPOILED, 7))
    training.every_steps = 100
    training.run(training.step)

    first, second = training.events("replayed")
    assert first["checkpoint"] == second["checkpoint"]
    assert sorted(first["bad_samples"] + second["bad_samples"]) == [7, SPOILED]
    assert second["compared_steps"] == second["equal_steps"] == second["bad_step"] > first["bad_step"]
    assert training.events("completed")


def test_only_steps_of_the_present_course_are_compared(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=(SPOILED, 7))
    training.every_steps = 100
    weight: Any = training.model[0].weight
    known: set[int] = set()

    def report(loss: torch.Tensor) -> dict[str, Any]:
        step, norm = training.opened.step_count, weight.grad.norm()
        is_new = step not in known
        known.add(step)
        # What is done again after a roll-back has no loss any more.
        return {"loss": loss, "grad_norm": norm} if is_new else {"grad_norm": norm}

    training.reported = report
    training.run(training.step)

    first, second = training.events("replayed")
    assert first["compared_steps"] == first["equal_steps"] == first["bad_step"]
    assert second["compared_steps"] == second["equal_steps"] == second["bad_step"] - first["bad_step"] > 0


def test_steps_of_an_earlier_attempt_are_compared(tmp_path: Path) -> None:
    for stops_after in (7, None):
        # The bad sample is in step 8, and the last loss before that is of step 4.
        training = Training(tmp_path, spoiled=(29,), samples=2 * FEW)
        training.loader = DataLoader(training.loader.dataset, SIZE)
        training.reported = lambda loss, own=training: (  # type: ignore[misc]
            {} if (own.opened.step_count + 1) % 4 else {"loss": loss}
        )
        with contextlib.suppress(ConnectionAbortedError):
            training.run(training.step, stops_after=stops_after)

    found = training.replayed()
    assert (found["checkpoint"], found["found_step"], found["bad_step"]) == ("step-00000000", 8, 5)
    assert found["compared_steps"] == found["equal_steps"] == 1


def test_a_step_function_that_reports_its_steps_is_told_not_to(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=(5,), samples=FEW)
    told: list[str] = []

    def step_and_report(batch: Batch) -> torch.Tensor:
        run = training.opened
        loss = training.step(batch)
        for report in (
            lambda: run.record(accuracy=1.0),
            run.save,
            lambda: run.batches([1]),
            lambda: iter(training.checks),
        ):
            with pytest.raises(UsageError) as refused:
                report()
            told.append(refused.value.message.split()[0])
        run.step(loss=loss)
        return loss

    training.run(step_and_report)

    assert told == ["run.record:", "run.save:", "run.batches:", "run.batches:"]
    assert "raised UsageError: run.step: called by the function given as replay=" in training.alarm("replay")
    assert training.opened.step_count == FEW // SIZE - 1
    assert training.events("completed")


class Worn(Noisy):
    """Its samples cannot be read again for some time."""

    def __getitem__(self, index: int) -> Batch:
        reads.append(index)
        if index == reads[0] and reads.count(index) == 2:
            raise OSError(5, "Input/output error")
        return super().__getitem__(index)


reads: list[int] = []


@pytest.mark.parametrize(
    ("ends_by", "said"),
    [
        ("data", "the batch of step 1 raised OSError: "),
        ("exception", "ZeroDivisionError: of nothing"),
        pytest.param("no loss", "is no loss: metric 'loss': expected a number", marks=pytest.mark.chaos),
    ],
)
def test_data_or_a_step_function_that_fails_ends_the_replay_only(
    tmp_path: Path, ends_by: str, said: str
) -> None:
    training = Training(tmp_path, spoiled=(5,), samples=FEW)
    if ends_by == "data":
        reads.clear()
        training.loader = DataLoader(Worn((5,), FEW, float("nan")), SIZE, shuffle=True)

    def fail(_batch: Batch) -> None:
        if ends_by == "exception":
            raise ZeroDivisionError("of nothing")

    training.run(fail)

    assert said in training.alarm("replay")
    assert training.replayed()["same"] is None
    assert len(training.events("rolled-back")) == 1
    assert training.events("completed")


def test_a_replay_that_would_be_long_or_has_other_steps_is_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replaying, "MOST_STEPS", 0)
    training = Training(tmp_path / "long", spoiled=(5,), samples=FEW)
    training.run(training.step)
    assert "at most 0 are done again" in capsys.readouterr().err

    monkeypatch.undo()
    two = Training(tmp_path / "two", spoiled=(5,), samples=FEW)
    two.run(two.step, every=2)
    assert "what replay= was given does a step with one batch" in capsys.readouterr().err
    assert training.events("replayed") == two.events("replayed") == []
    assert len(two.events("rolled-back")) == 1


def test_a_request_to_stop_ends_a_replay_and_is_obeyed(tmp_path: Path) -> None:
    training = Training(tmp_path, spoiled=(13,), samples=FEW)
    training.loader = DataLoader(training.loader.dataset, SIZE)

    def stop(batch: Batch) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return training.step(batch)

    with pytest.raises(SystemExit) as left:
        training.run(stop)

    assert left.value.code == 75
    assert "ended early: the run was asked to stop" in training.alarm("replay")
    again = Training(tmp_path, spoiled=(13,), samples=FEW)
    again.loader = DataLoader(again.loader.dataset, SIZE)
    again.run(None)
    assert again.opened.step_count == FEW // SIZE - 1
