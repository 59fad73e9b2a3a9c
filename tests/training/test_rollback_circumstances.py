"""Going back at the end of a run, at several places of one, asked to stop, and without space on the disk."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from unbroken import Health
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StorageFullError, UnhealthyError
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.training.health import recovery
from unbroken.training.passes import Pass
from unbroken.training.preemption import StopRequested
from unbroken.training.whole_state import WholeState

from .rolled_back import BATCHES, SIZE, Data, events, final_parts, history, quarantined
from .runs import names


def steps(
    directory: Path, bad: Collection[int], *, of: int = 12, until: int = 1000, **options: Any
) -> list[int]:
    """Take a step with each of so many batches, some of them bad, and return the batches in order."""
    seen = []
    options = {"save": [unbroken.EverySteps(1000)], "keep": [], "health": Health(), **options}
    with unbroken.Run(directory, model=nn.Linear(1, 1), **options) as run:
        for _ in run.epochs(1):
            for batch in run.batches(range(of)):
                seen.append(batch)
                run.step(loss=math.nan if batch in bad else 1.0 + batch % 2)
                if run.step_count >= until:
                    return seen
    return seen


@pytest.mark.parametrize("action", ["roll-back", "stop", "warn"])
def test_what_is_found_at_the_last_step_of_a_script_that_leaves_its_loop_is_acted_on(
    action: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"until": 6, "save": [unbroken.EverySteps(2)], "health": Health(action=action)}
    leaves = {"roll-back": StopRequested, "stop": UnhealthyError}.get(action)
    if leaves is None:
        assert steps(tmp_path, {5}, **options) == [0, 1, 2, 3, 4, 5]
        assert [event["what"] for event in events(tmp_path, "alarm")] == ["non-finite"]
        return
    with pytest.raises(leaves):
        steps(tmp_path, {5}, **options)
    assert events(tmp_path, "completed") == []
    assert bool(events(tmp_path, "failed")) is (action == "stop")
    if action == "roll-back":
        assert steps(tmp_path, {5}, **options) == [4, 6]


def test_bad_batches_far_from_each_other_are_got_past_each_by_itself_however_rarely_it_saves(
    tmp_path: Path,
) -> None:
    seen = steps(tmp_path, {4, 9, 14, 19, 24}, of=30)
    assert seen[-5:] == [25, 26, 27, 28, 29]
    rollbacks = read_rollbacks(tmp_path)
    assert [[(one.first, one.last) for one in entry.windows] for entry in rollbacks] == [
        [(number, number)] for number in (4, 9, 14, 19, 24)
    ]
    assert {entry.in_a_row for entry in rollbacks} == {1}
    # Found at steps 5, 9, 13 and so on; a state is saved as soon as the step after it is behind it.
    assert [event["step"] for event in events(tmp_path, "rolled-back")] == [0, 7, 11, 15, 19]


def test_what_went_back_in_another_process_saves_once_it_is_past_the_place_as_well(tmp_path: Path) -> None:
    with pytest.raises(StopRequested):
        steps(tmp_path, {4}, of=10, allow=["model.nothing"])
    assert steps(tmp_path, {4}, of=10, allow=["model.nothing"]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert names(tmp_path) == ["step-00000000", "step-00000007", "step-00000009"]


def first_time(act: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    """Return `act`, which `before` comes before when it is called first."""
    left = [before]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return act(*arguments, **options)

    return wrapped


@pytest.mark.parametrize("moment", ["going back", pytest.param("leaving out", marks=pytest.mark.chaos)])
def test_asked_to_stop_while_it_goes_back_it_stops_without_another_step(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = WholeState if moment == "going back" else Pass
    name = "go_back" if moment == "going back" else "_leave_out"

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, first_time(getattr(place, name), ask))
        with pytest.raises(StopRequested):
            steps(tmp_path, {4, 5}, save=[unbroken.EverySteps(2)])
    assert [event["step"] for event in events(tmp_path, "step")] == [1, 2, 3, 4, 5]
    assert names(tmp_path) == ["step-00000000", "step-00000002", "step-00000004"]
    assert steps(tmp_path, {4, 5}, save=[unbroken.EverySteps(2)])[-4:] == [8, 9, 10, 11]


def no_space() -> None:
    raise StorageFullError("rollbacks.json: No space left on device", hint="free space")


@pytest.mark.parametrize(("place", "name"), [(recovery, "add_rollback"), (CheckpointStore, "quarantine")])
def test_a_disk_without_space_is_waited_for_in_going_back_as_well(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, first_time(getattr(place, name), no_space))
    # The second time it goes farther back, and one is set aside.
    assert steps(tmp_path, {5, 6}, save=[unbroken.EverySteps(1)])[-1] == 11
    assert {*quarantined(tmp_path)} == {"step-00000005"}
    assert len(read_rollbacks(tmp_path)) == 2


def test_what_cannot_be_put_on_record_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "add_rollback", first_time(recovery.add_rollback, no_space))
    with pytest.raises(StorageFullError):
        steps(tmp_path, {5}, full_disk="go-on")
    assert names(tmp_path) == ["step-00000000"]
    assert steps(tmp_path, {5}, full_disk="go-on")[-1] == 11


def train_much(
    directory: Path, bad: int | None = None, left_out: Collection[int] = (), **options: Any
) -> None:
    """Train two models with an optimizer each, a scaler and averaged weights, in two loops in each epoch."""
    torch.manual_seed(1)
    first, second = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)), nn.Linear(6, 3)
    parts: dict[str, Any] = {
        "first": first,
        "second": second,
        "adam": torch.optim.AdamW(first.parameters(), lr=0.01),
        "sgd": torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3),
        "average": torch.optim.swa_utils.AveragedModel(second),
    }
    warm, main = (DataLoader(Data(of, noisy=False), SIZE) for of in ([], [] if bad is None else [bad]))
    with unbroken.Run(directory, health=Health(), **options, **parts) as run:
        for _ in run.epochs(1):
            for loader in (warm, main):
                for inputs, labels, samples in run.batches(loader):
                    if loader is main and samples[0].item() // SIZE in left_out:
                        continue
                    loss = nn.functional.cross_entropy(second(first(inputs)), labels)
                    parts["scaler"].scale(loss).backward()
                    for optimizer in (parts["adam"], parts["sgd"]):
                        parts["scaler"].step(optimizer)
                        optimizer.zero_grad()
                    parts["scaler"].update()
                    parts["average"].update_parameters(second)
                    run.step(loss=loss)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [2, BATCHES - 2])
def test_all_kinds_of_parts_are_gone_back_with_in_the_second_loop_of_an_epoch(
    number: int, tmp_path: Path
) -> None:
    found, reference = tmp_path / "found", tmp_path / "reference"
    train_much(reference, left_out={number}, save=[unbroken.EverySteps(1000)])
    every = [unbroken.EverySteps(1)]
    options: dict[str, Any] = {"save": every, "snapshot": every, "keep": [unbroken.KeepLast(1)]}
    train_much(found, bad=number * SIZE, **options)
    assert [event["in_process"] for event in events(found, "rolled-back")] == [True]
    assert history(found) == history(reference)
    assert final_parts(found) == final_parts(reference)
