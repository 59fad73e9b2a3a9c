"""Real supervisors and real processes: starting, refusing to start, being looked at."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from unbroken.rundir.heartbeat import read_heartbeat

if TYPE_CHECKING:
    from .conftest import Bench


def test_output_goes_to_stdout_notices_to_stderr_and_records_to_the_run_directory(bench: Bench) -> None:
    done = bench.run("sh", "-c", "echo one; echo two >&2")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n")
    assert "attempt 1 started" in done.stderr
    assert "completed" in done.stderr
    assert bench.output() == "one\ntwo\n"
    assert bench.read("attempts/0001/exit.json")["code"] == 0
    assert bench.verdict(1)["outcome"] == "completed"
    assert (bench.state()["state"], bench.state()["exit_code"]) == ("done", 0)
    journal = [json.loads(line) for line in (bench.directory / "journal.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in journal]
    assert kinds == ["run-started", "attempt-started", "leader-ended", "attempt-ended", "run-ended"]
    assert not (bench.directory / "supervisor-holder.json").exists()


@pytest.mark.chaos
def test_a_second_run_in_the_same_directory_is_a_further_attempt(bench: Bench) -> None:
    assert bench.run("echo", "first").returncode == 0
    again = bench.run("echo", "second")
    assert (again.returncode, again.stdout) == (0, "second\n")
    assert bench.output(2) == "second\n"


def test_the_attempt_gets_a_clean_environment_of_its_own(bench: Bench) -> None:
    script = bench.script(
        "look.py",
        """
        import json, os, signal, sys
        names = ("UNBROKEN_RUN_DIR", "UNBROKEN_ATTEMPT", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "MINE")
        print(json.dumps({
            "environment": {name: os.environ.get(name) for name in names},
            "leads its session": os.getsid(0) == os.getpid(),
            "stdin": sys.stdin.read(),
            "directory": os.getcwd(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "hang-up": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
            "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
            "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2)[:-1],
        }))
        """,
    )
    bench.environment |= {"MINE": "kept", "PYTHONUNBUFFERED": "0"}
    seen = json.loads(bench.python(script).stdout)
    assert seen == {
        "environment": {
            "UNBROKEN_RUN_DIR": str(bench.directory),
            "UNBROKEN_ATTEMPT": "1",
            "PYTHONUNBUFFERED": "0",
            "PYTHONFAULTHANDLER": "1",
            "MINE": "kept",
        },
        "leads its session": True,
        "stdin": "",
        "directory": str(bench.place),
        "blocked": [],
        "hang-up": True,
        "interrupt": True,
        "descriptors": [],
    }


@pytest.mark.chaos
def test_a_module_of_the_users_does_not_take_the_place_of_one_of_ours(bench: Bench) -> None:
    bench.script("json.py", "raise SystemExit('the wrong json')")
    done = bench.run("echo", "fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")


@pytest.mark.chaos
def test_arguments_of_the_command_stay_its_own(bench: Bench) -> None:
    done = bench.run("echo", "--name", "x", "--", "--grace", "-h")
    assert done.stdout == "--name x -- --grace -h\n"


@pytest.mark.parametrize("command", ["nowhere-to-be-found", "./nowhere", "/etc/passwd", "/etc"])
def test_a_command_that_cannot_be_started_leaves_nothing_behind(bench: Bench, command: str) -> None:
    done = bench.run(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {command}: ")
    assert "\n\nhint: " in done.stderr
    assert list(bench.place.iterdir()) == []


@pytest.mark.chaos
def test_a_place_that_cannot_be_a_run_directory_is_an_error_and_starts_nothing(bench: Bench) -> None:
    (bench.place / "file").write_text("in the way")
    for place in ("file", "file/below", "/proc/nothing-can-be-made-here"):
        done = bench.cli("run", "--run-dir", place, "--", "touch", str(bench.place / "started"))
        assert done.returncode != 0
        assert done.stderr.startswith("error: ")
        assert place in done.stderr
    assert not (bench.place / "started").exists()


def test_the_directory_of_another_program_is_refused(bench: Bench) -> None:
    bench.directory.mkdir(parents=True)
    (bench.directory / "run.json").write_text('{"format": "something else"}')
    done = bench.run("echo", "no")
    assert done.returncode == 78
    assert "something else" in done.stderr
    assert [path.name for path in bench.directory.iterdir()] == ["run.json"]


@pytest.mark.chaos
def test_a_run_of_another_name_is_refused(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    done = bench.cli("run", "--name", "other", "--run-dir", str(bench.directory), "--", "true")
    assert done.returncode == 2
    assert "expected run other, found run it" in done.stderr


def test_a_second_starter_is_refused_with_who_and_since_when(bench: Bench, training: str) -> None:
    first = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    supervisor = bench.state()["supervisor"]["process_id"]
    second = bench.python(training)
    assert second.returncode == 78
    assert f"process {supervisor} on " in second.stderr
    assert " since 2" in second.stderr
    assert bench.attempts() == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


def test_detached_it_returns_at_once_and_the_run_goes_on(bench: Bench, training: str) -> None:
    done = bench.python(training, "--detach")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"unbroken logs -f {bench.directory}" in done.stderr
    bench.until(lambda: "training" in bench.output())
    assert bench.state()["state"] == "running"
    assert bench.cli("stop", "it").returncode == 0
    assert bench.state()["state"] == "stopped"


@pytest.mark.chaos
def test_the_default_name_is_that_of_the_script(bench: Bench) -> None:
    script = bench.script("fit.py", "")
    assert bench.cli("run", "--", sys.executable, script).returncode == 0
    assert (bench.place / "runs" / "fit" / "run.json").exists()


@pytest.mark.chaos
def test_a_reader_that_goes_away_ends_the_view_and_not_the_run(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        for step in range(100):
            print("step", step)
            time.sleep(0.01)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    assert viewer.stdout is not None
    assert viewer.stderr is not None
    viewer.stdout.readline()
    viewer.stdout.close()
    assert viewer.wait(timeout=30) == 1
    said = viewer.stderr.read()
    assert "the run goes on" in said
    assert "Traceback" not in said
    viewer.stderr.close()
    bench.until(lambda: bench.state().get("state") == "done")
    assert bench.output().count("step") == 100


@pytest.mark.chaos
def test_a_run_is_found_by_its_name_from_any_directory(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    status = bench.command("status", "it", "--json")
    done = subprocess.run(status, cwd="/", env=bench.environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["directory"] == str(bench.directory)


@pytest.mark.chaos
def test_the_same_command_goes_on_in_the_same_run(bench: Bench) -> None:
    script = bench.script("fit.py", "import os; print(os.environ['UNBROKEN_ATTEMPT'])")
    for attempt in ("1", "2"):
        assert bench.cli("run", "--", sys.executable, script).stdout == f"{attempt}\n"


def test_a_closed_terminal_ends_the_view_and_not_the_run(bench: Bench, training: str) -> None:
    terminal, inside = pty.openpty()
    # Whoever runs the tests may have left hang-ups ignored, as nohup does.
    command = ["env", "--default-signal=HUP", "setsid", "--ctty"]
    command += bench.command("run", "--name", "it", "--", sys.executable, training)
    viewer = bench.popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    bench.until(lambda: "training" in bench.output() and bench.state()["leader"])
    # Nothing holds the terminal any more: the kernel hangs up on the viewer.
    os.close(terminal)
    assert viewer.wait(timeout=30) in (-signal.SIGHUP, 1)
    assert bench.state()["state"] == "running"
    step = _step(bench)
    bench.until(lambda: _step(bench) > step)
    os.kill(bench.state()["supervisor"]["process_id"], signal.SIGTERM)
    bench.until(lambda: bench.state()["state"] == "stopped")
    assert "saved" in bench.output()


def _step(bench: Bench) -> int:
    beat = read_heartbeat(bench.directory / "attempts/0001/heartbeat")
    return beat.step if beat is not None else 0
