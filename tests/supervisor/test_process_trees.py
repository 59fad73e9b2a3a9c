"""Nothing of an attempt outlives it, however it tries, and nothing starts beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Bench

# A daemon by the book: two forks and a session of its own, deaf to what asks politely.
ESCAPE = """
import os, signal, sys, time
from pathlib import Path
place = Path(os.environ["UNBROKEN_RUN_DIR"])
def escape():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            (place / "escaped").write_text(str(os.getpid()))
            while True:
                time.sleep(1)
        os._exit(0)
    while not (place / "escaped").exists() or not (place / "escaped").read_text():
        time.sleep(0.01)
"""


def test_an_escaped_daemon_is_gone_before_the_next_attempt_starts(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        ESCAPE
        + """
if os.environ["UNBROKEN_ATTEMPT"] == "1":
    escape()
    os.kill(os.getpid(), signal.SIGKILL)
print("there" if Path("/proc", (place / "escaped").read_text()).exists() else "gone")
""",
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "gone\n")
    assert any("left after its leader" in line for line in bench.verdict(1)["evidence"])


def test_what_is_left_at_the_end_is_ended_too(bench: Bench, running: Callable[[int], bool]) -> None:
    done = bench.python(bench.script("train.py", ESCAPE + "escape()\n"))
    assert done.returncode == 0
    assert not running(int((bench.directory / "escaped").read_text()))


def test_stop_now_takes_the_escaped_along(bench: Bench, running: Callable[[int], bool]) -> None:
    script = bench.script("train.py", ESCAPE + "escape()\nprint('ready', flush=True)\ntime.sleep(600)\n")
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    bench.until(lambda: "ready" in bench.output())
    assert bench.cli("stop", "it", "--now").returncode == 0
    assert not running(int((bench.directory / "escaped").read_text()))
    viewer.communicate(timeout=30)
    assert viewer.returncode == 143


def test_workers_that_end_by_themselves_are_not_called_leftovers(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, time
        if os.fork() == 0:
            time.sleep(0.3)
            print("worker done", flush=True)
        """,
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "worker done\n")
    assert not any("left after" in line for line in bench.verdict(1)["evidence"])


def test_a_tree_that_forks_while_it_is_killed_is_emptied(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("forking", flush=True)
        while True:
            if os.fork() == 0:
                os.setsid()
            else:
                # The parent goes, the child goes on: never the same process twice.
                os._exit(0)
            time.sleep(0.005)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", "sh", "-c", f"{sys.executable} {script}; sleep 600")
    bench.until(lambda: "forking" in bench.output())
    assert bench.cli("stop", "it", "--now").returncode == 0
    viewer.communicate(timeout=30)
    assert bench.state()["state"] == "stopped"


def test_when_the_supervisor_is_killed_the_attempt_goes_on_and_nothing_starts_beside_it(
    bench: Bench, training: str
) -> None:
    viewer = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    state = bench.state()
    leader = state["leader"]["process_id"]
    os.kill(state["supervisor"]["process_id"], signal.SIGKILL)
    _, said = viewer.communicate(timeout=30)
    assert viewer.returncode == 1
    assert "the supervisor was ended by SIGKILL" in said

    assert bench.cli("status", "it").stdout.count("lost") == 1
    stop = bench.cli("stop", "it")
    assert stop.returncode == 1
    assert f"process {leader} still runs" in stop.stderr
    beside = bench.python(training)
    assert beside.returncode == 78
    assert f"process {leader} (attempt 1)" in beside.stderr
    assert bench.attempts() == 1

    os.kill(leader, signal.SIGTERM)
    bench.until(lambda: "saved" in bench.output())
    bench.until(lambda: not bench.strays())
    assert bench.run("echo", "again").returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs the rights to become somebody else")
def test_what_cannot_be_ended_is_named(bench: Bench) -> None:
    script = bench.script(
        "end.py",
        """
        import os
        from pathlib import Path
        from unbroken.rundir.process_tree import ProcessTree, become_subreaper, spawn
        become_subreaper()
        leader = spawn(["sleep", "600"], environment=os.environ, output=Path(os.devnull))
        # Without the rights to signal it, the child is as unkillable as one in state D.
        os.setuid(65534)
        left = ProcessTree(leader).end(term_seconds=0.1, kill_seconds=0.1)
        print(left == [f"process {leader} (sleep, state S)"], left)
        """,
    )
    process = bench.popen([sys.executable, script], stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=30)
    assert said.startswith("True "), said
    assert bench.strays()
    bench.sweep()
