"""Looking at runs: status, logs, names, from any directory, while they run and after."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

from unbroken.rundir.heartbeat import Heartbeat

if TYPE_CHECKING:
    from .conftest import Bench

FIELDS = {
    *("name", "run_id", "directory", "command", "state", "reason", "exit_code", "attempt", "restarts"),
    *("process_id", "step", "phase", "beat_age_seconds", "checkpoint", "outcome", "evidence", "hint"),
    *("started", "changed", "next_start", "deadline", "host", "supervisor_process_id"),
    *("goal_step", "resources", "totals", "gpus"),
}


def status(bench: Bench, *target: str) -> dict[str, object]:
    done = bench.cli("status", *target, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, object] = json.loads(done.stdout)
    return value


def test_status_of_a_running_run_tells_its_step_and_the_age_of_its_beat(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    (bench.directory / "checkpoints" / "step-00000007").mkdir(parents=True)
    (bench.directory / "checkpoints" / "step-00000012").mkdir()
    (bench.directory / "checkpoints" / ".staging-step-00000020").mkdir()
    seen = status(bench, "it")
    assert set(seen) == FIELDS
    assert (seen["state"], seen["attempt"], seen["restarts"]) == ("running", 1, 0)
    assert seen["checkpoint"] == "step-00000012"
    assert isinstance(seen["step"], int)
    assert seen["step"] > 0
    assert isinstance(seen["beat_age_seconds"], float)
    assert seen["beat_age_seconds"] < 5
    text = bench.cli("status", "it").stdout
    assert "running for" in text
    assert f"process {seen['process_id']}" in text
    assert bench.cli("stop", "it").returncode == 0
    assert status(bench, "it")["exit_code"] == 75


def test_status_without_a_target_lists_the_runs_that_are_there(bench: Bench) -> None:
    assert bench.cli("status").stderr.startswith("no run is known")
    for name in ("first", "second", "third"):
        assert bench.cli("run", "--name", name, "--", "true").returncode == 0
    shutil.rmtree(bench.place / "runs" / "second")
    (bench.place / "runs" / "first" / "supervisor.json").write_text("{torn")
    listed = json.loads(bench.cli("status", "--json").stdout)
    assert [(run["name"], run["state"]) for run in listed] == [("third", "done"), ("first", "unreadable")]
    assert all(set(run) == FIELDS for run in listed)
    text = bench.cli("status").stdout
    assert text.splitlines()[0].split()[:2] == ["RUN", "STATE"]
    assert "second" not in text


def test_a_run_without_a_supervisor_has_a_status_too(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    (bench.directory / "supervisor.json").unlink()
    with_beat = bench.directory / "attempts" / "0001" / "heartbeat"
    beat = Heartbeat(with_beat)
    beat.beat(phase="eval", step=41, checkpoint_step=-1)
    beat.close()
    seen = status(bench, "it")
    assert (seen["state"], seen["attempt"], seen["step"], seen["phase"]) == ("unsupervised", 1, 41, "eval")
    assert "41, eval" in bench.cli("status", "it").stdout


def test_the_newest_checkpoint_is_that_of_the_highest_step_whatever_lies_beside_it(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    assert status(bench, "it")["checkpoint"] is None
    folder = bench.directory / "checkpoints"
    for name in ("step-99999999", "step-100000000", "step-100000000.1", ".staging-x", "step-1", "notes.txt"):
        (folder / name).mkdir(parents=True)
    assert status(bench, "it")["checkpoint"] == "step-100000000.1"


def test_a_target_is_a_path_or_a_name_and_an_ambiguous_name_is_an_error(bench: Bench) -> None:
    assert bench.run("echo", "here").returncode == 0
    elsewhere = bench.place / "elsewhere" / "deep" / "it"
    assert bench.cli("logs", "it").stdout == "here\n"
    assert bench.cli("logs", "runs/it").stdout == "here\n"
    assert bench.cli("run", "--run-dir", str(elsewhere), "--", "echo", "there").returncode == 0
    assert bench.cli("logs", str(elsewhere)).stdout == "there\n"

    home = bench.place
    bench.place = bench.place / "elsewhere"
    ambiguous = bench.cli("logs", "it")
    bench.place = home
    assert ambiguous.returncode == 2
    assert str(elsewhere) in ambiguous.stderr
    assert str(bench.directory) in ambiguous.stderr


def test_without_a_target_the_current_directory_is_meant_and_else_the_last_run(bench: Bench) -> None:
    assert bench.cli("logs").returncode == 2
    assert bench.run("echo", "it").returncode == 0
    assert bench.cli("run", "--name", "later", "--", "echo", "later").returncode == 0
    last = bench.cli("logs")
    assert (last.stdout, "run later in" in last.stderr) == ("later\n", True)
    bench.place = bench.directory
    assert bench.cli("logs").stdout == "it\n"


def test_a_name_that_means_nothing_is_a_usage_error(bench: Bench) -> None:
    (bench.place / "plain").mkdir()
    assert bench.cli("status", "nowhere").returncode == 2
    assert "found no run.json in it" in bench.cli("status", "plain").stderr


def test_a_run_goes_on_where_it_cannot_be_remembered(bench: Bench) -> None:
    (bench.place / "state").write_text("in the way of the registry")
    assert bench.run("echo", "fine").returncode == 0
    assert "known by its path only" in (bench.directory / "supervisor.log").read_text()


def test_logs_show_the_newest_attempt_or_the_one_asked_for(bench: Bench) -> None:
    assert bench.run("sh", "-c", "echo attempt $UNBROKEN_ATTEMPT; test $UNBROKEN_ATTEMPT = 2").returncode == 0
    assert bench.cli("logs", "it").stdout == "attempt 2\n"
    assert bench.cli("logs", "it", "--attempt", "1").stdout == "attempt 1\n"
    assert bench.cli("logs", "it", "--attempt", "1", "-f").stdout == "attempt 1\n"
    missing = bench.cli("logs", "it", "--attempt", "3")
    assert (missing.returncode, missing.stdout) == (2, "")


def test_logs_as_json_are_one_object_a_line_even_for_bytes_that_are_no_text(bench: Bench) -> None:
    assert bench.run("printf", r"one\ntw\377o\nno end").returncode == 0
    lines = [json.loads(line) for line in bench.cli("logs", "it", "--json").stdout.splitlines()]
    texts = ("one", "tw\N{REPLACEMENT CHARACTER}o", "no end")
    assert [(line["attempt"], line["line"], line["rank"]) for line in lines] == [
        (1, text, None) for text in texts
    ]
    assert all(time.time() - 60 < line["time"] <= time.time() + 1 for line in lines)


def test_logs_of_a_run_without_output_are_empty(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    done = bench.cli("logs", "it")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no output yet\n")


def test_logs_follow_a_run_over_its_attempts_to_its_end(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, time
        from pathlib import Path
        attempt = os.environ["UNBROKEN_ATTEMPT"]
        print("attempt", attempt)
        while not Path("go" + attempt).exists():
            time.sleep(0.02)
        print("over", attempt)
        if attempt == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert bench.python(script, "--detach").returncode == 0
    bench.until(lambda: "attempt" in bench.output())
    follower = bench.start("logs", "-f", "it")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "attempt 1\n"
    assert follower.poll() is None
    (bench.place / "go1").touch()
    assert follower.stdout.readline() == "over 1\n"
    assert follower.stdout.readline() == "attempt 2\n"
    (bench.place / "go2").touch()
    rest, _ = follower.communicate(timeout=30)
    assert (follower.returncode, rest) == (0, "over 2\n")


def test_ctrl_c_ends_a_follower_and_not_the_run(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    follower = bench.start("logs", "-f", "it")
    assert follower.stdout is not None
    follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert "Traceback" not in said
    assert status(bench, "it")["state"] == "running"
    assert bench.cli("stop", "it").returncode == 0


def test_a_supervisor_of_another_boot_is_lost(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    path = bench.directory / "supervisor.json"
    snapshot = bench.state()
    snapshot |= {"state": "running", "exit_code": None}
    # This process lives, but it is not the one that wrote this: it started at another time.
    snapshot["supervisor"] |= {"process_id": os.getpid(), "start_ticks": 1}
    path.write_text(json.dumps(snapshot))
    assert status(bench, "it")["state"] == "lost"
    assert bench.cli("logs", "-f", "it").returncode == 0
    snapshot["supervisor"]["host"] = "another host, which cannot be asked"
    path.write_text(json.dumps(snapshot))
    assert status(bench, "it")["state"] == "running"
