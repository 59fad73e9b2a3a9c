"""Real SIGKILLs at random moments of a run that takes a snapshot at every step."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.writers import wait_for_writers
from unbroken.testing.runs import compare_runs

from ..training.processes import train
from ..training.saving import SCRIPT
from ..zygote import start_script
from .test_kills import STARTED_SECONDS, check_what_is_left, is_training, stray_files

SAVE_EVERY = 50
ENDLESS = 10**9


def kill_at_a_random_moment(run_dir: Path, arguments: list[str], dice: random.Random) -> int:
    """Start an attempt, kill it up to half a second after its training began; return the step it was in."""
    running = start_script(SCRIPT, str(run_dir), *arguments, output=run_dir.parent / "output")
    started = time.monotonic()
    while not is_training(run_dir, running.process_id):
        if time.monotonic() > started + STARTED_SECONDS:
            os.kill(running.process_id, signal.SIGKILL)
            pytest.fail(f"it did not start: {running.wait().stderr}")
        time.sleep(0.001)
    # Not a wait for something to happen: the moment of the kill is what is random here.
    time.sleep(dice.random() ** 2 * 0.5)
    os.kill(running.process_id, signal.SIGKILL)
    done = running.wait()
    assert done.returncode == -signal.SIGKILL, done.stderr
    attempt = layout.attempt_directory(run_dir, layout.attempts(run_dir)[-1])
    beat = read_heartbeat(attempt / layout.HEARTBEAT)
    # None if it was killed in the middle of a beat.
    return -1 if beat is None else beat.step


def lost_steps(step: int, kept: int) -> int:
    """Tell how many steps of those that were done when it was in `step` are lost, and that they may be."""
    began_save = (step - 1) // SAVE_EVERY * SAVE_EVERY
    # A snapshot has to wait only for a save that is being written.
    assert kept >= min(step - 1, began_save), "more is lost than was waited for"
    return max(step - 1 - kept, 0)


def survive(run_dir: Path, expected: Path, arguments: list[str], kills: int, seed: int) -> None:
    dice, newest, furthest, lost = random.Random(seed), 0, 0, []
    arguments = [*arguments, "--snapshot-every", "1", "--save-every", str(SAVE_EVERY), "--torch"]
    # Slow enough for a save to be over long before the next.
    arguments += ["--step-seconds", "0.01"]
    for _ in range(kills):
        step = kill_at_a_random_moment(run_dir, [*arguments, "--steps", str(ENDLESS)], dice)
        wait_for_writers(run_dir)
        assert not [path for path in stray_files(run_dir) if "staging" in path], "a save was not finished"
        newest = check_what_is_left(run_dir, newest)
        furthest = max(furthest, step, newest)
        lost.append(lost_steps(step, newest))
    assert lost.count(0) > kills * 0.6, "hardly any kill found a snapshot of the step before"
    last = furthest + 5
    print(f"\n{kills} kills in {last} steps; lost steps {sum(lost)}, at {kills - lost.count(0)} kills")
    for place in (run_dir, expected):
        done = train(place, *arguments, "--steps", str(last), script=SCRIPT)
        assert done.returncode == 0, done.stderr
    assert compare_runs(expected, run_dir).differences == ()
    assert not (run_dir / layout.QUARANTINE).exists()
    assert len(CheckpointStore(run_dir).names()) <= kills + 1


@pytest.mark.chaos
@pytest.mark.parametrize(("size_mb", "kills"), [(0, 100), (20, 50)])
def test_a_hundred_kills_lose_no_more_than_they_may(tmp_path: Path, size_mb: int, kills: int) -> None:
    survive(tmp_path / "run", tmp_path / "expected", ["--size-mb", str(size_mb)], kills, seed=size_mb)
