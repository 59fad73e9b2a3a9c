"""The view of a run that is going on already."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from .in_process import look

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
# More than a pipe takes.
print(("x" * 999 + "\\n") * 999)
print("end", attempt)
if attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_views_show_all_that_follows_over_attempts_and_end_with_the_run(bench: Bench) -> None:
    assert bench.python(bench.script("train.py", TWICE), "--detach").returncode == 0
    bench.until(lambda: "line 29" in bench.output())
    follower = bench.start("logs", "-f", "it")
    attached = bench.start("attach", "it", "--tail", "2")
    assert attached.stdout is not None
    assert [attached.stdout.readline() for _ in range(2)] == ["line 28 of 1\n", "line 29 of 1\n"]
    assert follower.stdout is not None
    assert follower.stdout.readline() == "line 0 of 1\n"
    (bench.place / "go1").touch()
    assert attached.stdout.readline() == "over 1\n"
    while (line := attached.stdout.readline()) != "end 1\n":
        assert line.strip("x") == "\n"
    assert attached.stdout.readline() == "line 0 of 2\n"
    (bench.place / "go2").touch()
    assert attached.stderr is not None
    out, said = attached.stdout.read(), attached.stderr.read()
    attached.wait(timeout=30)
    assert "line 29 of 2\nover 2\n" in out
    assert out.endswith("x\n\nend 2\n")
    assert (attached.returncode, bench.state()["exit_code"]) == (0, 0)
    assert "attempt 1 ended" in said
    assert "attempt 2 started" in said
    followed = ["line 0 of 1", *follower.stdout.read().splitlines()]
    assert followed.count("x" * 999) == 2 * 999
    assert [line for line in followed if line.strip("x")] == [
        line
        for n in (1, 2)
        for line in (*(f"line {number} of {n}" for number in range(30)), f"over {n}", f"end {n}")
    ]
    assert follower.wait(timeout=30) == 0


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
    refused = look(bench, "attach", "it")
    assert refused.returncode == 1
    assert "it is held" in refused.stderr


def test_ctrl_c_ends_a_view_of_a_run_and_the_run_goes_on(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    views = {bench.start("attach", "it"): "detached; the run goes on", bench.start("logs", "-f", "it"): ""}
    for view, words in views.items():
        assert view.stdout is not None
        assert view.stdout.readline() == "training\n"
        view.send_signal(signal.SIGINT)
        _, said = view.communicate(timeout=30)
        assert view.returncode == 130
        assert words in said
        assert "Traceback" not in said
    assert bench.state()["state"] == "running"
    assert look(bench, "stop", "it").returncode == 0


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
