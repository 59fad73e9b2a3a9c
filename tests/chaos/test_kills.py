"""Real SIGKILLs at random moments of a run that saves all the time."""

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
from unbroken.testing.runs import compare_runs

from ..training.processes import SCRIPT, train
from ..zygote import start_script

# More epochs than any of these runs lives to see.
ENDLESS = ["--epochs", "100000", "--save-every", "2"]
STARTED_SECONDS = 60.0


def kill_at_a_random_moment(run_dir: Path, arguments: list[str], dice: random.Random) -> None:
    """Start an attempt, see that it cleans up, and kill it up to half a second after its training began."""
    left = set(stray_files(run_dir))
    running = start_script(SCRIPT, str(run_dir), *arguments, output=run_dir.parent / "output")
    started = time.monotonic()
    while not is_training(run_dir, running.process_id):
        if time.monotonic() > started + STARTED_SECONDS:
            os.kill(running.process_id, signal.SIGKILL)
            pytest.fail(f"it did not start: {running.wait().stderr}")
        time.sleep(0.001)
    assert left.isdisjoint(stray_files(run_dir)), "the next start leaves what the killed one left"
    # Not a wait for something to happen: the moment of the kill is what is random here.
    time.sleep(dice.random() ** 2 * 0.5)
    os.kill(running.process_id, signal.SIGKILL)
    done = running.wait()
    assert done.returncode == -signal.SIGKILL, done.stderr


def is_training(run_dir: Path, process_id: int) -> bool:
    numbers = layout.attempts(run_dir)
    if not numbers:
        return False
    beat = read_heartbeat(layout.attempt_directory(run_dir, numbers[-1]) / layout.HEARTBEAT)
    return beat is not None and beat.process_id == process_id and beat.phase == "training"


def check_what_is_left(run_dir: Path, newest: int) -> int:
    """Everything listed is intact and the newest is not older than before; return the newest step."""
    store = CheckpointStore(run_dir)
    names = store.names()
    for name in names:
        assert store.get(name).verify().is_intact, name
    step = store.get(names[-1]).step if names else 0
    assert step >= newest, "a committed checkpoint was lost"
    return step


def stray_files(run_dir: Path) -> list[str]:
    return [
        str(path) for path in run_dir.rglob("*") if ".staging-" in path.name or ".unbroken-tmp" in path.name
    ]


def survive(run_dir: Path, expected_dir: Path, arguments: list[str], kills: int, seed: int) -> None:
    dice = random.Random(seed)
    newest = interrupted_saves = 0
    for _ in range(kills):
        kill_at_a_random_moment(run_dir, arguments, dice)
        interrupted_saves += bool(stray_files(run_dir))
        newest = check_what_is_left(run_dir, newest)
    assert newest > kills / 4, "the run made no progress between the kills"
    last = newest + 5
    done = train(run_dir, *arguments, "--term-at", str(last))
    assert done.returncode == 75, done.stderr
    assert stray_files(run_dir) == []
    assert not (run_dir / layout.QUARANTINE).exists()
    print(f"\n{kills} kills, {interrupted_saves} in the middle of a save, {last} steps")

    reference = train(expected_dir, *arguments, "--term-at", str(last))
    assert reference.returncode == 75, reference.stderr
    assert compare_runs(expected_dir, run_dir).differences == ()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_few_kills_change_nothing(tmp_path: Path, workers: int) -> None:
    survive(tmp_path / "run", tmp_path / "expected", [*ENDLESS, "--workers", str(workers)], 5, seed=workers)


@pytest.mark.chaos
@pytest.mark.parametrize(("workers", "kills"), [(0, 140), (2, 60)])
def test_two_hundred_kills_change_nothing(tmp_path: Path, workers: int, kills: int) -> None:
    survive(tmp_path / "run", tmp_path / "expected", [*ENDLESS, "--workers", str(workers)], kills, seed=7)
