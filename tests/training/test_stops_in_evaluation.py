"""A stop is obeyed inside a long evaluation, and a resume is as if the evaluation had never begun."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import control
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.training import boundary

from .runs import names, words_of


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(12):
            yield torch.randn(4) + index


class Stop:
    """Asks for a stop in the second batch of one evaluation."""

    def __init__(self, at: int | None, directory: Path, by: str = "signal") -> None:
        self.at, self.directory, self.by = at, directory, by
        self.batches = 0

    def look(self, run: unbroken.Run) -> None:
        self.batches += 1
        if run.step_count == self.at and self.batches == 2:
            if self.by == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                control.request_stop(self.directory, reason="a user")


def train(directory: Path, seed: int, kind: str, stop: Stop) -> list[tuple[int, float]]:
    """Train three epochs of six steps, or up to the stop; return what was evaluated, by step."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data: Any = Stream() if kind == "stream" else Noisy()
    shuffled = {"shuffle": True} if kind != "stream" else {}
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "persistent" else {}
    loader = DataLoader(data, batch_size=2, **shuffled, **workers)  # type: ignore[arg-type]
    validation = DataLoader(data, batch_size=3, **workers)  # type: ignore[arg-type]
    found = []
    randomness: Any = "keyed" if kind == "keyed" else "capture"
    with unbroken.Run(directory, model=model, optimizer=optimizer, schedule=schedule, save=[]) as run:
        for _ in run.epochs(3):
            for batch in run.batches(loader, randomness=randomness):
                optimizer.zero_grad()
                loss = (model(batch) ** 2).mean()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
            # Not part of what is kept before the evaluation: it is done again.
            schedule.step()
            stop.batches, total = 0, 0.0
            with torch.no_grad():
                for batch in run.batches(validation):
                    stop.look(run)
                    total += model(batch).sum().item()
            run.record(total=total)
            found.append((run.step_count, total))
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "kind",
    [
        *("keyed", "stream"),
        *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("plain", "persistent")),
    ],
)
def test_a_stop_inside_an_evaluation_loses_no_step_and_the_resume_is_exact(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if evaluations were long, of which the first has told.
    monkeypatch.setattr(boundary, "_SHORT_SECONDS", 0.0)
    monkeypatch.setattr(boundary, "_MANY_COPIES", 0)
    undisturbed = train(tmp_path / "expected", 7, kind, Stop(None, tmp_path))
    run_dir = tmp_path / "run"
    stop = Stop(12 if kind in ("plain", "keyed") else 6, run_dir)
    with pytest.raises(SystemExit) as left:
        train(run_dir, 7, kind, stop)
    assert left.value.code == 75
    assert stop.batches == 2
    assert (words_of(run_dir).ending, words_of(run_dir).step) == ("stopped", stop.at)
    found = train(run_dir, 8, kind, Stop(None, tmp_path))
    assert found == [evaluated for evaluated in undisturbed if evaluated[0] >= (stop.at or 0)]
    expected, digests = (
        {path: entry.digest for path, entry in CheckpointStore(place).latest().manifest.tensors.items()}
        for place in (tmp_path / "expected", run_dir)
    )
    assert digests == expected


def test_a_short_evaluation_is_waited_for_and_costs_no_copy(tmp_path: Path) -> None:
    stop = Stop(12, tmp_path)
    with pytest.raises(SystemExit):
        train(tmp_path, 7, "plain", stop)
    assert stop.batches == 4
    assert CheckpointStore(tmp_path).latest().manifest.position.epoch == 2


def test_a_stop_file_is_seen_inside_an_evaluation_too(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, 7, "plain", Stop(6, tmp_path, by="file"))
    assert (words_of(tmp_path).reason, names(tmp_path)) == ("a user", ["step-00000006"])


def test_a_stop_before_the_first_step_is_obeyed_while_data_is_warmed_up(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left, unbroken.Run(tmp_path) as run:
        for batch in run.batches([0, 1, 2]):
            assert batch == 0
            os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 75
    assert (words_of(tmp_path).ending, names(tmp_path)) == ("stopped", [])


def test_a_stop_that_came_before_the_first_epoch_is_obeyed_as_it_begins(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path) as run:
        run.step()
    with pytest.raises(SystemExit), unbroken.Run(tmp_path) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in run.epochs(2):
            raise AssertionError
    assert (words_of(tmp_path).ending, words_of(tmp_path).checkpoint) == ("stopped", "step-00000001")


def test_an_evaluation_nested_in_training_is_finished_for_its_step_would_be_lost(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.batches([0, 1, 2]):
            run.step()
            for inner in run.batches([0, 1]):
                if run.step_count == 2 and inner == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
            run.record(evaluated=run.step_count)
    assert names(tmp_path) == ["step-00000002"]
    assert CheckpointStore(tmp_path).latest().manifest.metrics == {"evaluated": 2}


def test_the_copy_for_a_stop_does_not_become_a_checkpoint_by_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.epochs(2):
            for _ in run.batches([0, 1]):
                run.step()
            raise ZeroDivisionError
    assert names(tmp_path) == []


def test_the_heartbeat_tells_training_from_evaluation(tmp_path: Path) -> None:
    phases = []

    def beat() -> Any:
        return read_heartbeat(tmp_path / "attempts/0001/heartbeat")

    with unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.epochs(2):
            for _ in run.batches([0, 1]):
                phases.append(beat().phase)
                run.step()
                phases.append(beat().phase)
            phases.append(beat().phase)
            for _ in run.batches([0, 1]):
                phases.append(beat().phase)
            run.record(accuracy=1)
            phases.append(beat().phase)
        counted = beat()
    assert phases == 2 * [*["training"] * 4, *["evaluating"] * 4]
    # Each batch, of whatever loop, and each step.
    assert (counted.step, counted.progress) == (4, 12)
    assert beat().phase == "done"


def test_the_heartbeat_shows_an_evaluation_that_a_resumed_run_begins_with(tmp_path: Path) -> None:
    """Its first loop has no batch left: it seemed to compile, and was ended for that."""
    with pytest.raises(SystemExit), unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.epochs(2):
            for batch in run.batches([0, 1]):
                run.step()
                if batch == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    with unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.epochs(1):
            assert list(run.batches([0, 1])) == []
            found = read_heartbeat(tmp_path / "attempts/0002/heartbeat")
            assert found is not None
            assert (found.phase, found.step) == ("evaluating", 2)


@pytest.mark.parametrize(("batches_a_step", "goal"), [(1, 12), (2, 6)])
def test_the_heartbeat_knows_how_many_steps_there_will_be(
    tmp_path: Path, batches_a_step: int, goal: int
) -> None:
    goals = []
    with unbroken.Run(tmp_path, save=[]) as run:
        for _ in run.epochs(3):
            for number in run.batches([0, 1, 2, 3]):
                found = read_heartbeat(tmp_path / "attempts/0001/heartbeat")
                assert found is not None
                goals.append(found.goal_step)
                if (number + 1) % batches_a_step == 0:
                    run.step()
    assert goals[0] == 0
    assert goals[3:] == [goal] * 9


def test_a_run_that_is_done_has_no_step_to_go(tmp_path: Path) -> None:
    goals = []
    with unbroken.Run(tmp_path, save=[]) as run:
        for epoch in run.epochs(2):
            for _ in run.batches([[0, 1, 2], [0]][epoch]):
                run.step()
                goals.append(run._pulse._heartbeat.goal_step)
    found = read_heartbeat(tmp_path / "attempts/0001/heartbeat")
    assert found is not None
    assert (found.phase, found.step, found.goal_step) == ("done", 4, 4)
    assert goals[-1] > 4


def test_the_heartbeat_shows_how_long_training_waits_for_its_data_and_for_a_save(tmp_path: Path) -> None:
    class Slow:
        def __iter__(self) -> Iterator[int]:
            for number in range(3):
                signal.pause() if number < 0 else torch.randn(400, 400) @ torch.randn(400, 400)
                yield number

    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], background=False) as run:
        for _ in run.batches(Slow()):
            run.step()
    found = read_heartbeat(tmp_path / "attempts/0001/heartbeat")
    assert found is not None
    assert found.waited_seconds > 0
    assert found.save_seconds > 0
