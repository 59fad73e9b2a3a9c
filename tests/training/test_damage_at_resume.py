"""A run sets aside what is damaged, with the reason, says so, and goes on from the next older checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import DamagedError
from unbroken.training.report import RestoreReport

from .runs import names, tree_of

Damage = Callable[[Path], object]


class Objects:
    """A model that every step changes, and a table that is the same from step 2 on; each has a file."""

    def __init__(self) -> None:
        self.model = nn.Linear(600, 500)
        self.table = nn.Linear(600, 500)
        self.counters = {"n": 0}

    def at(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(step)
            self.table.weight.fill_(min(step, 2))
        self.counters["n"] = step

    def run(self, directory: Path) -> unbroken.Run:
        parts: dict[str, Any] = {"model": self.model, "table": self.table, "counters": self.counters}
        return unbroken.Run(directory, save=[unbroken.EverySteps(1)], keep=[], **parts)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    objects, directory = Objects(), tmp_path / "run"
    with objects.run(directory) as run:
        for step in (1, 2, 3):
            objects.at(step)
            run.step()
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]
    return directory


def resumed(directory: Path) -> RestoreReport:
    """Go on, check that the state is that of the checkpoint, and take one step more."""
    objects = Objects()
    with objects.run(directory) as run:
        assert run.restored is not None
        step = run.restored.step
        assert (run.step_count, objects.counters["n"]) == (step, step)
        assert bool((objects.model.weight == step).all())
        assert bool((objects.table.weight == min(step, 2)).all())
        objects.at(step + 1)
        run.step()
    newest = CheckpointStore(directory).latest()
    assert newest.step == step + 1
    assert newest.verify().is_intact
    return run.restored


def checkpoint(directory: Path, step: int) -> Path:
    return directory / f"checkpoints/step-{step:08d}"


def shard(directory: Path, step: int, part: str) -> Path:
    (found,) = checkpoint(directory, step).glob(f"{part}*.safetensors")
    return found


def empty(*files: str) -> Damage:
    def act(directory: Path) -> None:
        for path in checkpoint(directory, 3).iterdir():
            if not files or path.name.startswith(files):
                # A new file: what another checkpoint shares stays as it is.
                path.unlink()
                path.touch()

    return act


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def swap_inside(directory: Path) -> None:
    swap(shard(directory, 3, "model"), shard(directory, 3, "table"))


def swap_between(*parts: str) -> Damage:
    def act(directory: Path) -> None:
        for part in parts:
            (name,) = {path.name for path in checkpoint(directory, 3).glob(f"{part}*")}
            swap(checkpoint(directory, 2) / name, checkpoint(directory, 3) / name)

    return act


def damage_what_they_share(directory: Path) -> None:
    one, two = shard(directory, 2, "table"), shard(directory, 3, "table")
    assert one.read_bytes() == two.read_bytes()
    two.unlink()
    os.link(one, two)
    with two.open("r+b") as file:
        file.seek(500_000)
        file.write(b"\xff")


def put_a_file_there(directory: Path) -> None:
    checkpoint(directory, 9).write_text("mine")


DAMAGES: dict[str, tuple[Damage, list[int]]] = {
    "an empty manifest": (empty("manifest.json"), [3]),
    "an empty digest": (empty("manifest.digest"), [3]),
    "an empty large file": (empty("model"), [3]),
    "an empty small file": (empty("state"), [3]),
    "all files empty": (empty(), [3]),
    "files swapped inside a checkpoint": (swap_inside, [3]),
    "a file swapped with another checkpoint's": (swap_between("model"), [3, 2]),
    "manifests swapped": (swap_between("manifest.json", "manifest.digest"), [3, 2]),
    "all but the manifest swapped": (swap_between("model", "table"), [3, 2]),
    "an inode that two checkpoints share": (damage_what_they_share, [3, 2]),
    "a directory without files": (lambda directory: checkpoint(directory, 9).mkdir(), [9]),
    "a file that has the name of a checkpoint": (put_a_file_there, [9]),
    "a link that has the name of a checkpoint": (
        lambda directory: checkpoint(directory, 9).symlink_to("step-00000003"),
        [9],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_set_aside_with_the_reason_and_the_next_older_checkpoint_is_used(
    run_dir: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    act, damaged = DAMAGES[damage]
    act(run_dir)
    report = resumed(run_dir)
    assert report.step == (3 if damaged == [9] else min(damaged) - 1)
    aside = [f"step-{step:08d}" for step in damaged]
    assert list(report.passed_over) == aside
    assert sorted(os.listdir(run_dir / "quarantine")) == sorted(aside)
    said = capsys.readouterr().err
    for name in aside:
        words = json.loads((run_dir / f"quarantine/{name}/reason.json").read_text())
        assert words["checkpoint"] == name
        assert f"checkpoints/{name}/" in words["reason"]
        assert f"{name} was passed over: {words['reason']}; now in quarantine/{name}" in said


def test_what_is_in_quarantine_is_left_there_by_all_that_follows(run_dir: Path) -> None:
    empty("model")(run_dir)
    resumed(run_dir)
    before = tree_of(run_dir / "quarantine")
    objects = Objects()
    parts: dict[str, Any] = {"model": objects.model, "table": objects.table, "counters": objects.counters}
    with unbroken.Run(run_dir, keep=[unbroken.KeepLast(1)], **parts) as run:
        run.step()
    assert names(run_dir) == ["step-00000004"]
    assert tree_of(run_dir / "quarantine") == before


def test_when_all_share_what_is_damaged_the_run_does_not_begin_anew(run_dir: Path) -> None:
    for step in (1, 2, 3):
        for path in checkpoint(run_dir, step).iterdir():
            os.truncate(path, 0)
    for _ in range(2):
        with pytest.raises(DamagedError, match="found 3 damaged ones in quarantine/"):
            resumed(run_dir)
    assert len(os.listdir(run_dir / "quarantine")) == 3


def test_foreign_files_and_stray_directories_are_no_damage_and_are_left_alone(run_dir: Path) -> None:
    stray = run_dir / "checkpoints/step_final"
    stray.mkdir()
    (stray / "model.safetensors").write_bytes(b"mine")
    (run_dir / "checkpoints/notes.txt").write_text("mine")
    (checkpoint(run_dir, 3) / "notes.txt").write_text("mine")
    (checkpoint(run_dir, 3) / "more").mkdir()
    report = resumed(run_dir)
    assert (report.step, report.passed_over) == (3, {})
    assert not (run_dir / "quarantine").exists()
    assert (stray / "model.safetensors").read_bytes() == b"mine"
    assert (run_dir / "checkpoints/notes.txt").read_text() == "mine"
    assert (checkpoint(run_dir, 3) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("copy", [["cp", "-r"], ["cp", "-a"]], ids=" ".join)
def test_a_copied_run_goes_on_whatever_becomes_of_what_the_original_shares(
    run_dir: Path, tmp_path: Path, copy: list[str]
) -> None:
    twin = tmp_path / "twin"
    one, two = shard(run_dir, 2, "table"), shard(run_dir, 3, "table")
    two.unlink()
    os.link(one, two)
    subprocess.run([*copy, str(run_dir), str(twin)], check=True)
    damage_what_they_share(run_dir)
    assert resumed(twin).step == 3
    assert resumed(run_dir).step == 1
