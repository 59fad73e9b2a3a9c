"""Ranks of a real torchrun under the real supervisor, killed at random: the end is as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.rundir import layout

from .conftest import SCRIPT, Trained, assert_as

KILLS = 12


def keep_going(trained: Trained, state_home: Path, *options: str) -> None:
    """Run the script by torchrun under the supervisor, to its end."""
    trained.out.mkdir()
    keeping = ["unbroken.cli.main", "run", "--run-dir", str(trained.run), "--backoff", "0.01", "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    training = [str(SCRIPT), str(trained.run), str(trained.out), "2", *options]
    done = subprocess.run(
        [sys.executable, "-m", *keeping, *torchrun, *training],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        env={**os.environ, "XDG_STATE_HOME": str(state_home)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_at_random_train_to_the_same_bits(
    tmp_path: Path, seed: int, reference: Trained
) -> None:
    drawn, step = random.Random(seed), 1
    kills = []
    for attempt in range(1, KILLS + 1):
        step = min(12, step + drawn.choice([0, 1, 1, 2]))
        kills.append([attempt, drawn.randrange(2), step])
    trained = Trained(tmp_path)
    keep_going(trained, tmp_path / "state", "every=1", f"kills={json.dumps(kills)}")
    assert_as(trained, reference)
    # As many as there were steps left to be killed in.
    assert len(layout.attempts(trained.run)) > 5


@pytest.mark.chaos
def test_a_stop_of_one_rank_is_no_failure_and_the_run_goes_on(tmp_path: Path, reference: Trained) -> None:
    trained = Trained(tmp_path)
    keep_going(trained, tmp_path / "state", "term=5")
    assert_as(trained, reference)
    first = json.loads((layout.attempt_directory(trained.run, 1) / layout.VERDICT_FILE).read_text())
    assert first["outcome"] == "stopped"


@pytest.mark.chaos
def test_a_nan_on_one_rank_takes_all_back_and_past_it_without_anybody(
    tmp_path: Path, reference: Trained
) -> None:
    trained = Trained(tmp_path)
    keep_going(trained, tmp_path / "state", "nan=7", 'health={"warm_up_steps": 100}')
    weights = [json.loads(trained.last(rank))[0]["module.0.weight"] for rank in (0, 1)]
    assert weights[0] == weights[1]
    assert len(layout.attempts(trained.run)) == 2
