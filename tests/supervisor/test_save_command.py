"""`unbroken save`: a checkpoint now, of a run that really trains."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from .in_process import look, status

if TYPE_CHECKING:
    from .conftest import Bench

COUNTING = """
import time
import unbroken

class Model:
    count = 0
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]

model = Model()
with unbroken.Run(model=model, save=[]) as run:
    for epoch in run.epochs(1):
        for number in run.batches(range(100_000)):
            model.count += 1
            time.sleep(0.005)
            run.step()
            if run.step_count == 5:
                print("training", flush=True)
"""


@pytest.fixture
def counting(bench: Bench) -> str:
    script = bench.script("train.py", COUNTING)
    assert bench.python(script, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    return script


def checkpoints(bench: Bench) -> list[str]:
    found = (bench.directory / "checkpoints").glob("step-*")
    return sorted(path.name for path in found)


@pytest.mark.usefixtures("counting")
def test_save_prints_the_new_checkpoint_once_it_is_there(bench: Bench) -> None:
    before = status(bench)["step"]
    done = bench.cli("save", "it")
    assert done.returncode == 0, done.stderr
    assert checkpoints(bench) == [done.stdout.strip()]
    assert int(done.stdout.strip().removeprefix("step-")) >= before
    assert done.stderr == ""
    assert look(bench, "verify", "it").returncode == 0
    again = json.loads(look(bench, "save", "it", "--json").stdout)
    assert checkpoints(bench)[-1] == again["checkpoint"]
    assert again["step"] == int(again["checkpoint"].removeprefix("step-")) > before
    assert again["seconds"] > 0
    unwaited = look(bench, "save", "it", "--no-wait")
    assert (unwaited.returncode, unwaited.stdout) == (0, "")
    assert "asked for a checkpoint" in unwaited.stderr
    bench.until(lambda: len(checkpoints(bench)) == 3)
    assert bench.cli("stop", "it").returncode == 0
    ended = look(bench, "save", "it")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "nothing trains in it now (stopped)" in ended.stderr


@pytest.mark.usefixtures("counting")
def test_save_of_a_run_that_hangs_ends_in_time_and_of_one_that_dies_at_once(bench: Bench) -> None:
    leader = status(bench)["process_id"]
    os.kill(leader, signal.SIGSTOP)
    late = look(bench, "save", "it", "--timeout", "0.3")
    assert late.returncode == 1
    assert "no new checkpoint yet; it beat last " in late.stderr
    request = bench.directory / "control/save-now.json"
    assert request.exists()
    request.unlink()
    waiting = bench.start("save", "it")
    bench.until(request.exists)
    supervisor = bench.state()["supervisor"]["process_id"]
    os.kill(supervisor, signal.SIGKILL)
    os.kill(leader, signal.SIGKILL)
    _, said = waiting.communicate(timeout=20)
    assert waiting.returncode == 1
    assert "ended before it had saved (lost)" in said


def test_save_needs_a_script_that_uses_the_library(bench: Bench) -> None:
    assert bench.run("sleep", "60", options=("--detach",)).returncode == 0
    refused = look(bench, "save", "it")
    assert refused.returncode == 1
    assert "no heartbeat" in refused.stderr
    assert bench.cli("stop", "it", "--now").returncode == 0
    assert look(bench, "save", "nowhere").returncode == 2
