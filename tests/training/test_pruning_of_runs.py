"""What a run that trains deletes: its own, what no policy wants, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint import pins
from unbroken.checkpoint.store import CheckpointStore

from ..checkpoint.states import snapshot_at
from .runs import names, steps, tree_of

EACH_STEP = [unbroken.EverySteps(1)]
KEEP = [unbroken.KeepLast(1)]
Copy = Callable[[Path, Path], None]


def drop_foreign(directory: Path, *at: int) -> dict[str, bytes]:
    """Put checkpoints of another run into the directory, and return all their bytes."""
    for step in at:
        CheckpointStore(directory).save(snapshot_at(step, state={"x": {"y": step}}, run_id="another"))
    return foreign(directory, *at)


def foreign(directory: Path, *at: int) -> dict[str, bytes]:
    return {
        f"{step}/{file}": data
        for step in at
        for file, data in tree_of(directory / f"checkpoints/step-{step:08d}").items()
    }


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_run_that_began_anew_never_deletes_what_another_run_wrote(tmp_path: Path, resume: str) -> None:
    with unbroken.Run(tmp_path, save=EACH_STEP, keep=KEEP, resume=resume, n={"n": 0}) as run:
        steps(run, 2)
        dropped = drop_foreign(tmp_path, 1000, 1001, 1002)
        steps(run, 3)
    assert foreign(tmp_path, 1000, 1001, 1002) == dropped
    assert names(tmp_path) == ["step-00000005", "step-00001000", "step-00001001", "step-00001002"]


def test_stray_directories_and_files_outlive_a_run(tmp_path: Path) -> None:
    stray = tmp_path / "checkpoints/step_final"
    with unbroken.Run(tmp_path, save=EACH_STEP, keep=KEEP) as run:
        steps(run, 1)
        stray.mkdir(parents=True)
        (stray / "weights.bin").write_bytes(b"mine")
        (tmp_path / "checkpoints/notes.txt").write_text("mine")
        steps(run, 3)
    with unbroken.Run(tmp_path, keep=KEEP) as run:
        steps(run, 1)
    assert (stray / "weights.bin").read_bytes() == b"mine"
    assert (tmp_path / "checkpoints/notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["step-00000005"]


def copy_all(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)


def copy_by_links(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-al", str(source), str(target)], check=True)


@pytest.mark.parametrize("copy", [copy_all, copy_by_links])
def test_a_copy_of_a_run_that_trains_and_prunes_leaves_the_original_as_it_was(
    tmp_path: Path, copy: Copy
) -> None:
    original, twin = tmp_path / "original", tmp_path / "twin"
    with unbroken.Run(original, save=EACH_STEP, keep=[], n={"n": 0}) as run:
        steps(run, 3)
    before = tree_of(original / "checkpoints")
    copy(original, twin)
    with unbroken.Run(twin, save=EACH_STEP, keep=KEEP, n={"n": 0}) as run:
        assert run.step_count == 3
        steps(run, 2)
    assert names(twin) == ["step-00000005"]
    assert tree_of(original / "checkpoints") == before
    for name in names(original):
        assert CheckpointStore(original).is_intact(name)
    with unbroken.Run(original, save=EACH_STEP, keep=KEEP, n={"n": 0}) as run:
        assert run.step_count == 3
        steps(run, 1)
    assert (names(original), names(twin)) == (["step-00000004"], ["step-00000005"])
    assert CheckpointStore(twin).is_intact("step-00000005")


def test_a_pin_that_is_set_while_the_run_goes_on_counts_from_its_next_prune_on(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, save=EACH_STEP, keep=KEEP) as run:
        steps(run, 1)
        run._saver.wait()
        pins.pin(CheckpointStore(tmp_path).storage, "step-00000001", "", exists=lambda name: True)
        steps(run, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


def test_damaged_pins_keep_a_run_from_pruning_and_not_from_training(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, save=EACH_STEP, keep=KEEP) as run:
        steps(run, 1)
        run._saver.wait()
        (tmp_path / "pins.json").write_text("{")
        steps(run, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
