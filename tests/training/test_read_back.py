"""verify=: what was written is read back from the disk, and what was damaged on its way is written again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import SaveFailedError, UsageError
from unbroken.rundir.journal import read_events
from unbroken.testing.faults import SystemCall, system_calls

from .runs import flip, is_commit, names

FROZEN = "base-frozen-00.safetensors"
SHARD = "state-00.safetensors"


@contextmanager
def each_commit(*acts: Callable[[Path], None]) -> Iterator[list[Path]]:
    """Do one of `acts` to each checkpoint in turn, when it is committed and nobody has read it."""
    committed: list[Path] = []

    def rule(call: SystemCall) -> Any:
        result = call.make()
        if is_commit(call):
            place = Path(call.arguments[1])
            for act in acts[len(committed) : len(committed) + 1]:
                act(place)
            committed.append(place)
        return result

    with system_calls(rule):
        yield committed


def damage(place: Path) -> None:
    # A bit of each byte past the header, which is a page: no sample can miss that.
    data = (place / SHARD).read_bytes()
    (place / SHARD).write_bytes(data[:4096] + bytes(byte ^ 1 for byte in data[4096:]))


def leave(place: Path) -> None:
    """Nothing happens to it."""


def weight() -> torch.Tensor:
    return torch.arange(6.0)


def events(directory: Path, *kinds: str) -> list[str]:
    found = read_events(directory / "attempts/0001/events-rank0.jsonl")
    return [event["kind"] for event in found if event["kind"] in kinds]


@pytest.mark.parametrize("verify", ["sampled", "always"])
def test_what_was_damaged_is_set_aside_told_and_written_again(
    tmp_path: Path, verify: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with each_commit(damage), unbroken.Run(tmp_path, save=[], verify=verify, weight=weight()) as run:
        run.step()
    store = CheckpointStore(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    assert store.is_intact("step-00000001")
    assert (tmp_path / "latest").resolve().name == "step-00000001"
    (aside,) = (tmp_path / "quarantine").iterdir()
    assert (aside / "step-00000001" / SHARD).is_file()
    assert "read back damaged" in (aside / "reason.json").read_text()
    assert events(tmp_path, "saved", "damaged", "alarm") == ["saved", "damaged", "alarm", "saved"]
    told = capsys.readouterr().err
    assert f"step-00000001 was read back damaged ({SHARD}: tensor" in told


def test_earlier_checkpoints_that_share_a_damaged_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = torch.nn.Linear(600, 600).requires_grad_(False)
    with unbroken.Run(
        tmp_path, base=base, counters={"n": 0}, save=[], keep=[], background=False, verify="always"
    ) as run:
        for _ in range(2):
            run.step()
            run.save()
        # The bytes decay, which all of them share, after they were read back.
        flip(tmp_path / "checkpoints/step-00000001" / FROZEN)
        run.step()
    told = capsys.readouterr().err
    assert "; the same file belongs to step-00000001, step-00000002), now in quarantine/step-00000003" in told
    store = CheckpointStore(tmp_path)
    assert [store.is_intact(name) for name in store.names()] == [False, False, True]


def test_the_run_goes_on_from_what_was_written_again(tmp_path: Path) -> None:
    live = weight()
    with each_commit(damage), unbroken.Run(tmp_path, save=[], verify="always", weight=live) as run:
        live += 1
        run.step()
    again = torch.zeros(6)
    with unbroken.Run(tmp_path, resume="must", weight=again):
        assert torch.equal(again, live)


def test_a_damaged_manifest_is_found_by_a_sample(tmp_path: Path) -> None:
    def tear(place: Path) -> None:
        flip(place / "manifest.json", 20)

    with each_commit(tear), unbroken.Run(tmp_path, save=[], verify="sampled", weight=weight()) as run:
        run.step()
    assert events(tmp_path, "damaged") == ["damaged"]
    assert CheckpointStore(tmp_path).is_intact("step-00000001")


def test_a_file_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    commits: list[SystemCall] = []
    failed: list[SystemCall] = []

    def rule(call: SystemCall) -> Any:
        commits.extend([call] * is_commit(call))
        if call.name == "preadv" and commits and not failed:
            failed.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call.make()

    with system_calls(rule), unbroken.Run(tmp_path, save=[], verify="always", weight=weight()) as run:
        run.step()
    assert events(tmp_path, "saved", "damaged") == ["saved", "damaged", "saved"]


def test_a_disk_that_damages_the_second_writing_too_ends_the_run(tmp_path: Path) -> None:
    with (
        each_commit(leave, damage, damage),
        pytest.raises(SaveFailedError, match="twice"),
        unbroken.Run(
            tmp_path, save=[unbroken.EverySteps(1)], keep=[], verify="always", weight=weight()
        ) as run,
    ):
        run.step()
        run.step()
        run.step()
    # The one before it is what a restart goes on from.
    assert names(tmp_path) == ["step-00000001"]
    assert len([*(tmp_path / "quarantine").iterdir()]) == 2


def test_it_is_read_from_the_disk_once_though_retention_asks_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save": [unbroken.EverySteps(1)], "keep": [unbroken.KeepLast(1)]}
    with system_calls() as made, unbroken.Run(tmp_path, verify="always", weight=weight(), **options) as run:
        run.step()
        run.step()
    assert names(tmp_path) == ["step-00000002"]
    shard = tmp_path / "checkpoints/step-00000002" / SHARD
    opened = [call for call in made if call.name == "open" and call.arguments[0] == shard]
    # To have it forgotten, for its header, and for its tensor.
    assert len(opened) == 3


def test_nothing_is_read_back_unless_it_is_asked_for(tmp_path: Path) -> None:
    with each_commit(damage), unbroken.Run(tmp_path, save=[], weight=weight()) as run:
        run.step()
    assert not CheckpointStore(tmp_path).is_intact("step-00000001")


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected verify to be one of"):
        unbroken.Run(tmp_path, verify="sometimes", weight=weight())  # type: ignore[arg-type]
