"""Ctrl-C pressed twice while a checkpoint is written (zylo117/Yet-Another-EfficientDet-Pytorch#101).

The second interrupt hit the save that the first had started, on the final path: the only file was torn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat

SCRIPT = """
import sys
import unbroken

state = {"step": 0, "weights": b"x" * 8_000_000}
options = {"save": [unbroken.EverySteps(1)], "background": sys.argv[2] == "beside"}
with unbroken.Run(sys.argv[1], **options, state=state) as run:
    while True:
        state["step"] += 1
        # Another text each time: nothing of it is shared with the checkpoint before.
        state["weights"] = bytes([state["step"] % 256]) * 8_000_000
        run.step()
"""


@pytest.mark.parametrize("way", ["beside", pytest.param("in-the-loop", marks=pytest.mark.chaos)])
def test_the_checkpoint_before_is_untouched_and_the_next_start_goes_on_from_it(
    tmp_path: Path, way: str
) -> None:
    script, directory = tmp_path / "train.py", tmp_path / "run"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNBROKEN")}
    command = [sys.executable, str(script), str(directory), way]
    training = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_saves(directory, training)
        # As close as two presses of a key can be; a save is always going on here.
        training.send_signal(signal.SIGINT)
        time.sleep(0.05)
        training.send_signal(signal.SIGINT)
        _, said = training.communicate(timeout=60)
    finally:
        training.kill()
        training.wait()
    assert training.returncode in (75, 130, -signal.SIGINT), said
    store = CheckpointStore(directory)
    assert all(store.get(name).verify().is_intact for name in store.names())
    newest = store.latest()
    assert newest.step >= 2
    assert int(newest.manifest.parts["state"].state["step"]) == newest.step
    assert not (directory / layout.QUARANTINE).exists()


def wait_for_saves(directory: Path, training: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while True:
        beat = read_heartbeat(layout.attempt_directory(directory, 1) / layout.HEARTBEAT)
        if beat is not None and beat.checkpoint_step >= 2:
            return
        assert training.poll() is None, training.communicate()
        assert time.monotonic() < end, "no checkpoint in time"
        time.sleep(0.005)
