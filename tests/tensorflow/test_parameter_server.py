"""Parameter servers: the run lives in the coordinator, and what the servers hold is restored from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.testing.runs import compare_runs

from ..supervisor.conftest import Bench

SCRIPT = Path(__file__).with_name("parameter_server_script.py")
PATIENCE_SECONDS = 240.0


def beat(directory: Path) -> Beat | None:
    attempt = max(layout.attempts(directory), default=0)
    return read_heartbeat(layout.attempt_directory(directory, attempt) / layout.HEARTBEAT)


def has_trained(bench: Bench, steps: int) -> bool:
    found = beat(bench.directory)
    return found is not None and found.phase == "training" and found.step >= steps


def train(place: Path, shards: int, last: int) -> str:
    """Train to the step `last` without a supervisor, in a process of its own, and return what it says."""
    place.mkdir(exist_ok=True)
    (place / "last-step").write_text(str(last))
    command = [sys.executable, str(SCRIPT), str(place), str(shards)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN_")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [0, 1], ids=["first server", "second server"])
def test_a_killed_server_costs_the_work_since_the_last_checkpoint_and_no_more(
    bench: Bench, victim: int
) -> None:
    place = bench.place
    supervised = bench.start(
        "run", "--name", "it", "--backoff", "0.01", "--", sys.executable, str(SCRIPT), str(place), "2"
    )
    bench.until(lambda: has_trained(bench, 20), PATIENCE_SECONDS)
    newest = CheckpointStore(bench.directory).latest().step
    servers = [int(word) for word in (place / "servers").read_text().strip("[]").split(",")]
    os.kill(servers[victim], signal.SIGKILL)
    bench.until(lambda: bench.attempts() == 2 and has_trained(bench, newest + 10), PATIENCE_SECONDS)
    found = beat(bench.directory)
    assert found is not None
    last = found.step + 20
    (place / "last-step").write_text(str(last))
    out, err = supervised.communicate(timeout=PATIENCE_SECONDS)
    assert supervised.returncode == 0, (out, err)

    verdict = bench.verdict(1)
    assert verdict["outcome"] == "failed", verdict
    resumed = bench.output(2)
    step = int(resumed.partition("resumed from step-")[2][:8])
    assert newest <= step <= last, resumed
    train(place / "expected", 2, last)
    assert compare_runs(place / "expected/run", bench.directory).differences == ()


@pytest.mark.chaos
def test_a_sharded_variable_goes_on_in_another_number_of_shards(tmp_path: Path) -> None:
    train(tmp_path, 2, 6)
    checkpoint = CheckpointStore(tmp_path / "run").latest()
    assert tuple(checkpoint.manifest.tensors["weights/table"].shape) == (5, 3)
    said = train(tmp_path, 3, 9)
    assert "resumed from step-00000006" in said
    train(tmp_path / "expected", 2, 9)
    expected = CheckpointStore(tmp_path / "expected/run").latest().load()["weights"]
    assert CheckpointStore(tmp_path / "run").latest().load()["weights"] == expected
