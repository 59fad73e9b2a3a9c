"""Training in TensorFlow under the supervisor, killed again and again, in epochs and in saves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.testing.runs import compare_runs

from ..supervisor.conftest import Bench

SCRIPT = Path(__file__).with_name("supervised_script.py")
PATIENCE_SECONDS = 240.0
KILLS = 4


def beat(directory: Path) -> Beat | None:
    attempt = max(layout.attempts(directory), default=0)
    return read_heartbeat(layout.attempt_directory(directory, attempt) / layout.HEARTBEAT)


def is_training(bench: Bench, attempt: int, past: int) -> bool:
    found = beat(bench.directory)
    return (
        max(layout.attempts(bench.directory), default=0) == attempt
        and found is not None
        and found.phase == "training"
        and found.step > past
    )


@pytest.mark.chaos
def test_kills_in_epochs_and_in_saves_leave_the_result_as_it_would_have_been(bench: Bench) -> None:
    dice, past = random.Random(5), 0
    command = (sys.executable, str(SCRIPT), str(bench.place))
    supervised = bench.start("run", "--name", "it", "--backoff", "0.01", "--", *command)
    for attempt in range(1, KILLS + 1):
        bench.until(lambda: is_training(bench, attempt, past + 3), PATIENCE_SECONDS)  # noqa: B023 - at once
        # Not a wait for something to happen: the moment of the kill is what is random here.
        time.sleep(dice.random() ** 2 * 0.3)
        found = beat(bench.directory)
        assert found is not None
        os.kill(found.process_id, signal.SIGKILL)
        past = CheckpointStore(bench.directory).latest().step
    bench.until(lambda: is_training(bench, KILLS + 1, past + 3), PATIENCE_SECONDS)
    found = beat(bench.directory)
    assert found is not None
    last = found.step + 20
    (bench.place / "last-step").write_text(str(last))
    out, err = supervised.communicate(timeout=PATIENCE_SECONDS)
    assert supervised.returncode == 0, (out, err)
    for attempt in range(1, KILLS + 1):
        assert (bench.verdict(attempt)["outcome"], bench.verdict(attempt)["kind"]) == ("killed", "SIGKILL")

    done = subprocess.run(
        command, env=bench.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert compare_runs(bench.place / "run", bench.directory).differences == ()
