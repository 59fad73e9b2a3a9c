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

from .test_ranks import SCRIPT, Trained, assert_as, reference

KILLS = 12


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_at_random_train_to_the_same_bits(tmp_path: Path, seed: int) -> None:
    drawn, step = random.Random(seed), 1
    kills = []
    for attempt in range(1, KILLS + 1):
        step = min(12, step + drawn.choice([0, 1, 1, 2]))
        kills.append([attempt, drawn.randrange(2), step])
    trained = Trained(tmp_path)
    trained.out.mkdir()
    keeping = ["unbroken.cli.main", "run", "--run-dir", str(trained.run), "--backoff", "0.01", "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    training = [str(SCRIPT), str(trained.run), str(trained.out), "2", "every=1", f"kills={json.dumps(kills)}"]
    done = subprocess.run(
        [sys.executable, "-m", *keeping, *torchrun, *training],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_as(trained, reference())
    # As many as there were steps left to be killed in.
    assert len(layout.attempts(trained.run)) > 5
