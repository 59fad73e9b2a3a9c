"""The foreground of a run: it passes signals on and returns the run's code, whatever becomes of the view."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench

_STARTED = ("run", "--name", "it", "--backoff", "0.01", "--")
_MORE_THAN_A_PIPE_TAKES = 1 << 20


def test_a_signal_reaches_the_run_while_nobody_reads_what_it_prints(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        f"""
        import os, signal, time
        from pathlib import Path
        from unbroken.rundir.control import read_stop
        # It comes with the stop file, and would end the script before its last word.
        signal.signal(signal.SIGTERM, lambda *_: None)
        print("x" * {_MORE_THAN_A_PIPE_TAKES}, flush=True)
        while read_stop(Path(os.environ["UNBROKEN_RUN_DIR"])) is None:
            time.sleep(0.01)
        print("told")
        """,
    )
    viewer = bench.start(*_STARTED, sys.executable, script)
    assert viewer.stdout is not None
    log = bench.directory / "attempts/0001/out.log"
    bench.until(lambda: log.exists() and log.stat().st_size > _MORE_THAN_A_PIPE_TAKES)
    assert select.select([viewer.stdout], [], [], 20)[0]
    viewer.send_signal(signal.SIGTERM)
    bench.until(lambda: bench.state()["exit_code"] is not None)
    out, said = viewer.communicate(timeout=30)
    assert viewer.returncode == bench.state()["exit_code"]
    # All of it, and the last word on the run behind it.
    assert out.endswith("x\ntold\n")
    assert len(out) == _MORE_THAN_A_PIPE_TAKES + len("\ntold\n")
    assert "saving, up to 2m00s" in said
    assert said.splitlines()[-1].startswith(f"unbroken: {bench.state()['state']}: ")


def test_output_that_cannot_be_written_costs_the_view_and_not_the_run(bench: Bench) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        command = bench.command(*_STARTED, "sh", "-c", "echo hello; exit 75")
        viewer = bench.popen(command, stdout=full, stderr=subprocess.PIPE)
        _, said = viewer.communicate(timeout=30)
        assert viewer.returncode == 75
        assert said.count("the output is not shown any more: ") == 1
        assert "Traceback" not in said
        mute = bench.popen(command, stdout=full, stderr=full)
        assert mute.wait(30) == 75


@pytest.mark.parametrize("is_the_job", [True, False])
def test_a_closed_pipe_ends_the_view_but_not_a_job_of_its_own(bench: Bench, is_the_job: bool) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        from pathlib import Path
        while not Path("go").exists():
            print("line", flush=True)
            time.sleep(0.02)
        raise SystemExit(75)
        """,
    )
    command = bench.command(*_STARTED, sys.executable, script)
    if is_the_job:
        # As systemd starts the process of a unit.
        command = ["sh", "-c", 'SYSTEMD_EXEC_PID=$$ exec "$@"', "sh", *command]
    viewer = bench.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert viewer.stdout is not None
    assert viewer.stderr is not None
    viewer.stdout.readline()
    viewer.stdout.close()
    while "nobody reads the output any more; the run goes on" not in viewer.stderr.readline():
        assert viewer.poll() is None
    assert bench.state()["state"] == "running"
    if not is_the_job:
        assert viewer.wait(30) == 1
    (bench.place / "go").touch()
    if is_the_job:
        assert viewer.wait(30) == 75
    viewer.stderr.close()
    bench.until(lambda: bench.state()["state"] == "stopped")


# In the place of a supervisor: it writes down what it is sent, and ends by SIGTERM.
_RECORDER = """
import signal, sys
for number in iter(lambda: signal.sigwait(wanted), None):
    print(number.name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
"""


def test_a_signal_of_an_engine_is_passed_on_also_after_a_ctrl_c(bench: Bench) -> None:
    recorder = _RECORDER.replace("wanted", "{signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}")
    script = bench.script(
        "view.py",
        f"""
        import os, signal, subprocess, sys
        from pathlib import Path
        from unbroken.cli.viewer import Viewer
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        viewer = Viewer(Path("it"), grace_seconds=100)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        supervisor = subprocess.Popen([sys.executable, "-c", {recorder!r}])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        sys.exit(viewer.show(supervisor))
        """,
    )
    viewer = bench.popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert viewer.stdout is not None
    assert viewer.stderr is not None
    sent = []
    # Before it shows anything, signals are kept for later.
    bench.until(lambda: len(bench.strays()) == 2)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        viewer.send_signal(number)
        sent.append(viewer.stdout.readline().strip())
    assert sent == ["SIGINT", "SIGUSR1", "SIGTERM"]
    assert viewer.wait(30) == 7
    said = viewer.stderr.read()
    assert said.count("saving, up to 1m40s") == 1
    assert "killing" not in said
    viewer.stdout.close()
    viewer.stderr.close()
