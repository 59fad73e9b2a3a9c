"""A real training under the real supervisor, through real disasters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir import layout
from unbroken.testing.runs import compare_runs

from .processes import SCRIPT, step_events, train


def unbroken(*arguments: str, state_home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unbroken.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "XDG_STATE_HOME": str(state_home)},
    )


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads((layout.attempt_directory(run_dir, attempt) / layout.VERDICT_FILE).read_text())
        for attempt in layout.attempts(run_dir)
    ]


@pytest.mark.chaos
def test_kill_stop_and_exception_are_told_apart_and_the_result_is_bit_identical(tmp_path: Path) -> None:
    expected, run_dir = tmp_path / "expected" / "run", tmp_path / "run"
    expected.parent.mkdir()
    assert train(expected).returncode == 0
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--plan", "kill:5,term:9,raise:14"]
    done = unbroken(
        *("run", "--run-dir", str(run_dir), "--backoff", "0.01", "--", *command),
        state_home=tmp_path / "state",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict["outcome"] for verdict in verdicts(run_dir)] == [
        "killed",
        "stopped",
        "failed",
        "completed",
    ]
    assert "a bug of the user" in " ".join(verdicts(run_dir)[2]["evidence"])
    assert compare_runs(expected, run_dir).differences == ()
    # Killed before step 5 after the save at 3, stopped at 9 with the state saved, failed before 14 after 12.
    assert [event["step"] for event in step_events(run_dir)] == [*range(1, 5), *range(4, 14), *range(13, 22)]
    found = json.loads(unbroken("status", str(run_dir), "--json", state_home=tmp_path / "state").stdout)
    assert (found["state"], found["attempt"], found["step"]) == ("done", 4, 21)


def test_a_model_that_changed_its_shape_is_held_not_restarted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, "--term-at", "4").returncode == 75
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--width", "9"]
    done = unbroken("run", "--run-dir", str(run_dir), "--", *command, state_home=tmp_path / "state")
    assert done.returncode == 78, done.stdout + done.stderr
    assert layout.attempts(run_dir) == [1, 2]
    assert "shape (9, 6), the checkpoint has shape (8, 6)" in done.stdout
    found = json.loads(unbroken("status", str(run_dir), "--json", state_home=tmp_path / "state").stdout)
    assert found["state"] == "held"
    assert "state-mismatch" in found["reason"] + " ".join(found["evidence"])
