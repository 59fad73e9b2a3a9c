"""A roll-back that is killed at any of its effects is completed by the next start, to the same end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.testing.runs import compare_checkpoints

from ..zygote import run_script
from .rolled_back import final_parts, history, quarantined, spoilt_once, train, train_on
from .rolled_back_script import EFFECTS

SCRIPT = Path(__file__).with_name("rolled_back_script.py")
# Before the first of them nothing is decided.
MOMENTS = [f"{side}:{name}" for name in EFFECTS for side in ("before", "after")][1:]


def script(directory: Path, kind: str, moment: str) -> tuple[int, str]:
    done = run_script(SCRIPT, str(directory), kind, moment, output=directory.parent / "output")
    return done.returncode, done.stderr


@pytest.mark.chaos
def test_the_supervisor_starts_a_run_again_that_stopped_to_go_back(tmp_path: Path) -> None:
    expected, directory = tmp_path / "expected", tmp_path / "run"
    train(expected, "ordered", left_out={0: {5}}, epochs=1, save_every=1)
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(directory), "there", "never"]
    done = subprocess.run(
        [sys.executable, "-m", "unbroken.cli.main", "run", "--run-dir", str(directory), "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(layout.attempts(directory)) == 2
    assert history(directory) == history(expected)
    assert final_parts(directory) == final_parts(expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    train(directory, "ordered", epochs=1, save_every=1, trouble=spoilt_once())
    return directory


@pytest.mark.chaos
def test_what_is_killed_in_this_test_goes_back_at_all(undisturbed: Path, tmp_path: Path) -> None:
    code, output = script(tmp_path / "run", "here", "never")
    assert code == 0, output
    assert f"effects {' '.join(EFFECTS)}\n" in output


@pytest.mark.parametrize(
    "moment",
    [at if at == "after:quarantine" else pytest.param(at, marks=pytest.mark.chaos) for at in MOMENTS],
)
def test_a_kill_in_the_middle_of_going_back_changes_nothing(
    moment: str, undisturbed: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    code, output = script(directory, "here", moment)
    assert code == -9, output
    train_on(directory, "ordered", epochs=1, save_every=1)
    assert history(directory) == history(undisturbed)
    first, second = CheckpointStore(directory).latest(), CheckpointStore(undisturbed).latest()
    assert compare_checkpoints(first, second)[1] == []
    assert {*quarantined(directory)} <= {*quarantined(undisturbed)}
    assert (directory / "latest").resolve().name == second.name
