"""The view of a run that is going on already."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench

TWICE = """
import os, signal, time
from pathlib import Path
attempt = os.environ["UNBROKEN_ATTEMPT"]
for number in range(30):
    print("line", number, "of", attempt)
while not Path("go" + attempt).exists():
    time.sleep(0.02)
print("over", attempt)
if attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_shows_the_last_lines_and_all_that_follows_and_ends_with_the_run(bench: Bench) -> None:
    assert bench.python(bench.script("train.py", TWICE), "--detach").returncode == 0
    bench.until(lambda: "line 29" in bench.output())
    attached = bench.start("attach", "it", "--tail", "2")
    assert attached.stdout is not None
    assert [attached.stdout.readline() for _ in range(2)] == ["line 28 of 1\n", "line 29 of 1\n"]
    (bench.place / "go1").touch()
    assert attached.stdout.readline() == "over 1\n"
    assert attached.stdout.readline() == "line 0 of 2\n"
    (bench.place / "go2").touch()
    assert attached.stderr is not None
    out, said = attached.stdout.read(), attached.stderr.read()
    attached.wait(timeout=30)
    assert out.endswith("line 29 of 2\nover 2\n")
    assert (attached.returncode, bench.state()["exit_code"]) == (0, 0)
    assert "attempt 1 ended" in said
    assert "attempt 2 started" in said


def test_it_ends_with_the_code_of_a_run_that_is_held(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        from pathlib import Path
        print("here")
        while not Path("go").exists():
            time.sleep(0.02)
        raise SystemExit(78)
        """,
    )
    assert bench.python(script, "--detach").returncode == 0
    bench.until(lambda: "here" in bench.output())
    attached = bench.start("attach", "it")
    assert attached.stdout is not None
    attached.stdout.readline()
    (bench.place / "go").touch()
    _, said = attached.communicate(timeout=30)
    assert attached.returncode == 78
    assert "held" in said
    refused = bench.cli("attach", "it")
    assert refused.returncode == 1
    assert "it is held" in refused.stderr


def test_ctrl_c_detaches_and_the_run_goes_on(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    attached = bench.start("attach", "it")
    assert attached.stdout is not None
    assert attached.stdout.readline() == "training\n"
    attached.send_signal(signal.SIGINT)
    _, said = attached.communicate(timeout=30)
    assert attached.returncode == 130
    assert "detached; the run goes on" in said
    assert "Traceback" not in said
    assert bench.state()["state"] == "running"
    assert bench.cli("stop", "it").returncode == 0


@pytest.mark.chaos
def test_it_says_so_when_the_supervisor_is_killed(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    attached = bench.start("attach", "it")
    assert attached.stdout is not None
    attached.stdout.readline()
    os.kill(bench.state()["supervisor"]["process_id"], signal.SIGKILL)
    _, said = attached.communicate(timeout=30)
    assert attached.returncode == 1
    assert "its supervisor is gone" in said
    bench.sweep()
