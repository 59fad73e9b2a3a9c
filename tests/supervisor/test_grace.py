"""The time to save in order: shown, compared with the last save, kept to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unbroken.rundir.control import StopRequest, can_still_save
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.supervisor.grace import in_words, is_too_short, last_save_seconds

if TYPE_CHECKING:
    from .conftest import Bench

# Saves, now and then, a state whose copying takes as long as SAVE_SECONDS says once it is asked to stop.
SLOW = """
import os, time
from pathlib import Path
import unbroken
from unbroken.rundir.control import read_stop

directory = Path(os.environ["UNBROKEN_RUN_DIR"])

class Slow:
    value = 0
    def state_dict(self):
        if read_stop(directory) is not None:
            time.sleep(float(os.environ["SAVE_SECONDS"]))
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

slow = Slow()
with unbroken.Run(save=[unbroken.EverySteps(5)], slow=slow) as run:
    while True:
        slow.value += 1
        time.sleep(0.01)
        run.step()
        if run.step_count == 12:
            print("training", flush=True)
"""


def stop_slow(bench: Bench, *, save_seconds: float, grace_seconds: float) -> tuple[int, str]:
    script = bench.script("slow.py", SLOW)
    bench.environment["SAVE_SECONDS"] = str(save_seconds)
    options = ("--name", "it", "--grace", str(grace_seconds))
    viewer = bench.start("run", *options, "--", sys.executable, script)
    bench.until(lambda: "training" in bench.output())
    assert bench.cli("stop", "it").returncode == 0
    _, said = viewer.communicate(timeout=30)
    return viewer.returncode, said


def names(bench: Bench) -> list[str]:
    return [entry["name"] for entry in json.loads(bench.cli("ls", "it", "--json").stdout)]


def test_a_save_that_is_slow_ends_within_a_grace_that_is_long_enough(bench: Bench) -> None:
    code, said = stop_slow(bench, save_seconds=0.6, grace_seconds=20)
    assert code == 75
    assert "a stop leaves it 20 s to save" in said
    assert bench.verdict(1)["is_saved"] is True


@pytest.mark.chaos
def test_a_save_that_is_cut_leaves_the_older_checkpoint_good(bench: Bench) -> None:
    code, _ = stop_slow(bench, save_seconds=30, grace_seconds=0.4)
    assert code == 143
    assert bench.verdict(1)["kind"] == "by-supervisor"
    assert bench.cli("verify", "it", "--json").stdout.count('"intact": true') >= 2


def with_save(directory: Path, save_seconds: float, attempt: int = 1) -> None:
    place = directory / "attempts" / f"{attempt:04d}"
    place.mkdir(parents=True, exist_ok=True)
    beat = Heartbeat(place / "heartbeat")
    beat.save_seconds = save_seconds
    beat.beat(phase="training", step=1, checkpoint_step=1)
    beat.close()


def test_the_start_says_when_the_last_save_took_longer_than_the_grace(tmp_path: Path) -> None:
    assert in_words(tmp_path, 120.0) == "a stop leaves it 120 s to save"
    with_save(tmp_path, 150.0)
    with_save(tmp_path, 0.0, attempt=2)
    assert last_save_seconds(tmp_path) == 150.0
    assert "the last save took 150.0 s: give it more time by `unbroken run --grace" in in_words(tmp_path, 120)


@pytest.mark.parametrize(("grace", "save", "expected"), [(5, 3, False), (1, 3, True), (0, 0, False)])
def test_a_grace_is_too_short_when_the_last_save_took_longer(
    grace: float, save: float, expected: bool
) -> None:
    assert is_too_short(grace, save) is expected


BEATING = """
import os, sys, time
from pathlib import Path
from unbroken.rundir.heartbeat import Heartbeat

beat = Heartbeat(Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / "0001" / "heartbeat")
beat.save_seconds = 3.0
for step in range(10_000):
    beat.beat(phase="training", step=step, checkpoint_step=-1)
    time.sleep(0.02)
"""


@pytest.mark.chaos
def test_a_save_longer_than_the_grace_is_warned_of_while_the_run_goes_on(bench: Bench) -> None:
    script = bench.script("train.py", BEATING)
    viewer = bench.start("run", "--name", "it", "--grace", "0.5", "--", sys.executable, script)
    bench.until(lambda: bench.state().get("hint"))
    status = bench.cli("status", "it").stdout
    assert "the last save took 3.0 s, and a stop leaves 0.5 s" in status
    bench.cli("stop", "it", "--now")
    _, said = viewer.communicate(timeout=30)
    assert said.count("the last save took 3.0 s, a stop leaves 0.5 s") == 1


@pytest.mark.parametrize(
    ("deadline", "save_seconds", "expected"),
    [(None, 50.0, True), (100.0, 0.0, True), (100.0, 10.0, True), (100.0, 10.5, False), (80.0, 0.1, False)],
)
def test_a_save_is_begun_only_if_it_can_end(
    deadline: float | None, save_seconds: float, expected: bool
) -> None:
    request = StopRequest(reason="preemption", deadline_seconds=deadline)
    assert can_still_save(request, save_seconds, 90.0) is expected
    assert can_still_save(None, save_seconds, 90.0) is True


TOO_LATE = """
import os, time
import unbroken
from unbroken.rundir.control import request_stop

with unbroken.Run(save=[unbroken.EverySteps(5)], background=False, counters={"seen": 0}) as run:
    while True:
        run.step()
        if run.step_count == 7:
            # As if the state were a thousand times as large.
            run._attempt.heartbeat.save_seconds = 40.0
            request_stop(run.directory, reason="preemption: test", deadline_seconds=time.time() + 20)
"""


@pytest.mark.chaos
def test_the_library_begins_no_save_that_cannot_end(bench: Bench) -> None:
    done = bench.python(bench.script("train.py", TOO_LATE), "--grace", "10")
    assert done.returncode == 75
    assert names(bench) == ["step-00000005"]
    (evidence,) = bench.verdict(1)["evidence"]
    assert evidence.startswith("the run said that its state is saved, at step 5 (preemption: test; not saved")
    assert "a save takes 40.0 s" in evidence
    found = bench.cli("doctor", "it").stdout
    assert "warning: the last save took 40.0 s, and a stop leaves 10 s" in found
