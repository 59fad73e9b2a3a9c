"""A trainer that slept over its lease on a file system without locks, and woke up beside its successor."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import RunBusyError
from unbroken.rundir.lock import RunLock

from ..zygote import start_script
from .runs import names, steps

DEADLINE_SECONDS = 60.0
SLEEPER = """
import errno, fcntl, sys, time
from pathlib import Path
import unbroken
from unbroken.rundir.lock import RunLock

def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
RunLock.__init__.__kwdefaults__["lease_seconds"] = float(sys.argv[2])
directory = Path(sys.argv[1])
with unbroken.Run(directory, save=[unbroken.EverySteps(1)], keep=[]) as run:
    run.step()
    while not (directory / "go").exists():
        time.sleep(0.01)
    run.step()
"""


def test_a_trainer_that_was_taken_over_while_it_slept_commits_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    defaults = RunLock.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setitem(defaults, "lease_seconds", 2.0)
    script, run_dir = tmp_path / "sleeper.py", tmp_path / "run"
    script.write_text(SLEEPER)
    sleeper = start_script(script, str(run_dir), "2.0", output=tmp_path / "output")
    running = [sleeper.process_id]
    # A stopped process would be left behind for ever if the test failed.
    request.addfinalizer(lambda: [os.kill(process_id, signal.SIGKILL) for process_id in running])
    wait_for_checkpoint(run_dir)
    with pytest.raises(RunBusyError, match=f"process {sleeper.process_id} on"), unbroken.Run(run_dir):
        pass
    os.kill(sleeper.process_id, signal.SIGSTOP)
    with unbroken.Run(run_dir, save=[unbroken.EverySteps(1)], keep=[]) as run:
        assert run.step_count == 1
        steps(run, 4)
        run._saver.wait()
        (run_dir / "go").touch()
        os.kill(sleeper.process_id, signal.SIGCONT)
        done = sleeper.wait()
        running.clear()
        steps(run, 1)
    assert done.returncode not in (0, 75)
    assert "attempt 1 was superseded by attempt 2" in done.stderr
    store = CheckpointStore(run_dir)
    assert names(run_dir) == [f"step-0000000{step}" for step in range(1, 7)]
    assert [store.get(name).manifest.attempt for name in names(run_dir)] == [1, 2, 2, 2, 2, 2]
    assert not (run_dir / "writer.json").exists()


def wait_for_checkpoint(run_dir: Path) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not CheckpointStore(run_dir).names():
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.01)
