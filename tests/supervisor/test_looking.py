"""Looking at runs: status, logs, names, from any directory, while they run and after."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.processes import identify_self

from .conftest import made_records
from .in_process import look, status

if TYPE_CHECKING:
    from .conftest import Bench

FIELDS = {
    *("name", "run_id", "directory", "command", "state", "reason", "exit_code", "attempt", "restarts"),
    *("process_id", "step", "phase", "beat_age_seconds", "checkpoint", "outcome", "evidence", "hint"),
    *("started", "changed", "next_start", "deadline", "host", "supervisor_process_id"),
    *("goal_step", "resources", "totals", "gpus"),
    *("save_interval", "alarm", "resume_certificate"),
}


def test_status_of_a_running_run_tells_its_step_and_the_age_of_its_beat(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    (bench.directory / "checkpoints" / "step-00000007").mkdir(parents=True)
    (bench.directory / "checkpoints" / "step-00000012").mkdir()
    (bench.directory / "checkpoints" / ".staging-step-00000020").mkdir()
    seen = status(bench)
    assert set(seen) == FIELDS
    assert (seen["state"], seen["attempt"], seen["restarts"]) == ("running", 1, 0)
    assert seen["checkpoint"] == "step-00000012"
    assert isinstance(seen["step"], int)
    assert seen["step"] > 0
    assert isinstance(seen["beat_age_seconds"], float)
    assert seen["beat_age_seconds"] < 5
    text = look(bench, "status", "it").stdout
    assert "running for" in text
    assert f"process {seen['process_id']}" in text
    assert look(bench, "stop", "it").returncode == 0
    assert status(bench)["exit_code"] == 75


def test_status_without_a_target_lists_the_runs_that_are_there(bench: Bench) -> None:
    assert look(bench, "status").stderr.startswith("no run is known")
    for name in ("first", "second"):
        bench.made(directory=bench.place / "runs" / name)
    records = made_records(bench.made(directory=bench.place / "runs" / "third"))
    records.show(state="done", exit_code=0)
    records.close()
    shutil.rmtree(bench.place / "runs" / "second")
    (bench.place / "runs" / "first" / "supervisor.json").write_text("{torn")
    listed = json.loads(look(bench, "status", "--json").stdout)
    assert [(run["name"], run["state"]) for run in listed] == [("third", "done"), ("first", "unreadable")]
    assert all(set(run) == FIELDS for run in listed)
    text = look(bench, "status").stdout
    assert text.splitlines()[0].split()[:2] == ["RUN", "STATE"]
    assert "second" not in text


def test_a_run_without_a_supervisor_has_a_status_too(bench: Bench) -> None:
    bench.made(b"")
    beat = Heartbeat(bench.directory / "attempts" / "0001" / "heartbeat")
    beat.beat(phase="eval", step=41, checkpoint_step=-1)
    beat.close()
    seen = status(bench)
    assert (seen["state"], seen["attempt"], seen["step"], seen["phase"]) == ("unsupervised", 1, 41, "eval")
    assert "41, eval" in look(bench, "status", "it").stdout


def test_the_newest_checkpoint_is_that_of_the_highest_step_whatever_lies_beside_it(bench: Bench) -> None:
    bench.made()
    assert status(bench)["checkpoint"] is None
    folder = bench.directory / "checkpoints"
    for name in ("step-99999999", "step-100000000", "step-100000000.1", ".staging-x", "step-1", "notes.txt"):
        (folder / name).mkdir(parents=True)
    assert status(bench)["checkpoint"] == "step-100000000.1"


def test_a_target_is_a_path_or_a_name_and_an_ambiguous_name_is_an_error(bench: Bench) -> None:
    bench.made(b"here\n")
    elsewhere = bench.place / "elsewhere" / "deep" / "it"
    assert look(bench, "logs", "it").stdout == "here\n"
    assert look(bench, "logs", "runs/it").stdout == "here\n"
    bench.made(b"there\n", directory=elsewhere)
    assert look(bench, "logs", str(elsewhere)).stdout == "there\n"

    home = bench.place
    bench.place = bench.place / "elsewhere"
    ambiguous = look(bench, "logs", "it")
    bench.place = home
    assert ambiguous.returncode == 2
    assert str(elsewhere) in ambiguous.stderr
    assert str(bench.directory) in ambiguous.stderr


def test_without_a_target_the_current_directory_is_meant_and_else_the_last_run(bench: Bench) -> None:
    assert look(bench, "logs").returncode == 2
    bench.made(b"it\n")
    bench.made(b"later\n", directory=bench.place / "runs" / "later")
    last = look(bench, "logs")
    assert (last.stdout, "run later in" in last.stderr) == ("later\n", True)
    bench.place = bench.directory
    assert look(bench, "logs").stdout == "it\n"


def test_a_name_that_means_nothing_is_a_usage_error(bench: Bench) -> None:
    (bench.place / "plain").mkdir()
    assert look(bench, "status", "nowhere").returncode == 2
    assert "found no run.json in it" in look(bench, "status", "plain").stderr


def test_a_run_goes_on_where_it_cannot_be_remembered(bench: Bench) -> None:
    (bench.place / "state").write_text("in the way of the registry")
    assert bench.run("echo", "fine").returncode == 0
    assert "known by its path only" in (bench.directory / "supervisor.log").read_text()


def test_logs_show_the_newest_attempt_or_the_one_asked_for(bench: Bench) -> None:
    bench.made(b"attempt 1\n", b"attempt 2\n")
    assert look(bench, "logs", "it").stdout == "attempt 2\n"
    assert look(bench, "logs", "it", "--attempt", "1").stdout == "attempt 1\n"
    assert look(bench, "logs", "it", "--attempt", "1", "-f").stdout == "attempt 1\n"
    missing = look(bench, "logs", "it", "--attempt", "3")
    assert (missing.returncode, missing.stdout) == (2, "")


def test_logs_as_json_are_one_object_a_line_even_for_bytes_that_are_no_text(bench: Bench) -> None:
    bench.made(b"one\ntw\xffo\nno end")
    lines = [json.loads(line) for line in look(bench, "logs", "it", "--json").stdout.splitlines()]
    texts = ("one", "tw\N{REPLACEMENT CHARACTER}o", "no end")
    assert [(line["attempt"], line["line"], line["rank"]) for line in lines] == [
        (1, text, None) for text in texts
    ]
    assert all(time.time() - 60 < line["time"] <= time.time() + 1 for line in lines)


def test_logs_of_a_run_without_output_are_empty(bench: Bench) -> None:
    bench.made(b"")
    done = look(bench, "logs", "it")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no output yet\n")


def test_a_supervisor_of_another_boot_is_lost(bench: Bench) -> None:
    records = made_records(bench.made())
    # This process lives, but it is not the one that wrote this: it started at another time.
    supervisor = replace(identify_self(), start_ticks=1)
    records.show(supervisor=supervisor)
    assert status(bench)["state"] == "lost"
    assert look(bench, "logs", "-f", "it").returncode == 0
    elsewhere = replace(supervisor, host="another host, which cannot be asked", boot_id="another")
    records.show(supervisor=elsewhere)
    records.close()
    assert status(bench)["state"] == "running"
