"""What `status` says of how a run does: its pace, what it lost, what it uses; and its exit codes."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from unbroken.rundir.files import write_json
from unbroken.rundir.processes import identify_self

from .conftest import made_records
from .in_process import look, status

if TYPE_CHECKING:
    from .conftest import Bench

# The first attempt makes 60 steps and is killed; the second begins at step 20.
TWICE = """
import os, signal, time
from pathlib import Path
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.journal import Journal

number = int(os.environ["UNBROKEN_ATTEMPT"])
here = layout.attempt_directory(Path(os.environ["UNBROKEN_RUN_DIR"]), number)
beat, journal = Heartbeat(here / "heartbeat"), Journal(here / layout.events_file())
beat.goal_step = 100
step = 20 if number == 2 else 0
journal.append("began", step=step)
while step < 80:
    time.sleep(0.01)
    step += 1
    beat.beat(phase="training", step=step, checkpoint_step=-1)
    journal.append("step", step=step, epoch=0, metrics={})
    if (number, step) == (1, 60):
        os.kill(os.getpid(), signal.SIGKILL)
print("far", flush=True)
time.sleep(60)
"""


def test_status_tells_how_long_it_takes_and_what_was_lost_over_restarts(bench: Bench) -> None:
    script = bench.script("train.py", TWICE)
    assert bench.python(script, "--detach").returncode == 0
    bench.until(lambda: "far" in bench.output(2))
    seen = status(bench)
    totals = seen["totals"]
    assert (seen["attempt"], seen["step"], seen["goal_step"]) == (2, 80, 100)
    # 80 steps in all; the 20 that are left take as long at the same rate.
    rate = totals["steps_per_second"]
    assert totals["to_go_seconds"] == pytest.approx(20 / rate)
    assert 0 < rate < 100
    # 40 steps of at least 10 ms are done again.
    assert totals["lost"]["redoing"] >= 0.4
    assert totals["lost"]["starting"] > 0
    assert totals["lost_seconds"] == pytest.approx(sum(totals["lost"].values()), abs=0.01)
    assert seen["resources"]["attempt"] in (1, 2)
    text = look(bench, "status", "it").stdout
    assert "step        80 of 100, training" in text
    assert "over all; " in text
    assert " redone" in text
    assert look(bench, "stop", "it", "--now").returncode == 0
    after = status(bench)
    assert after["totals"]["to_go_seconds"] is None
    assert after["totals"]["lost_seconds"] == pytest.approx(totals["lost_seconds"], abs=0.05)
    assert "to go" not in look(bench, "status", "it").stdout


def test_status_shows_what_the_attempt_uses_while_it_runs_and_an_alarm_as_hint(
    bench: Bench, training: str
) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: bench.read("resources.json"))
    seen = status(bench)["resources"]
    assert (seen["attempt"], seen["alarms"]) == (1, [])
    assert seen["processes"] >= 1
    assert min(seen["memory_bytes"], seen["memory_left_bytes"], seen["disk_free_bytes"]) > 0
    text = look(bench, "status", "it").stdout
    assert "memory      " in text
    assert " free" in text
    # The next reading comes seconds later.
    alarm = "at the present growth the memory is used up in 7 minutes: look for what keeps growing"
    reading = bench.read("resources.json") | {
        "alarms": [alarm],
        "memory_full_in_seconds": 420.0,
        "memory_growth_bytes_per_hour": 2.5e9,
        "data_wait_share": 0.12,
        # Clocks are set back, too.
        "time": time.time() + 1000,
    }
    write_json(bench.directory / "resources.json", reading)
    text = look(bench, "status", "it").stdout
    assert f"hint        {alarm}" in text
    assert text.count(alarm) == 1
    assert "growing by 2.5 GB/h" in text
    assert "used up in 7m00s" in text
    assert "training waits for batches 12% of its time" in text
    assert status(bench)["resources"]["age_seconds"] == 0
    for torn in ("{torn", "[]", '{"time": 1}', '{"time": 1, "attempt": 1, "alarms": 3}'):
        (bench.directory / "resources.json").write_text(torn)
        assert status(bench)["resources"] is None
    write_json(bench.directory / "resources.json", reading)
    assert look(bench, "status", "it", "--check").returncode == 0

    stopped = look(bench, "stop", "it")
    assert stopped.returncode == 0
    assert "within 2m00s, until " in stopped.stderr
    assert look(bench, "status", "it", "--check").returncode == 75
    assert "memory      " not in look(bench, "status", "it").stdout


def test_gpus_are_shown_of_a_run_that_goes_on(bench: Bench) -> None:
    modules = bench.place / "modules"
    modules.mkdir()
    (modules / "pynvml.py").write_text(
        "from types import SimpleNamespace as Values\n"
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetCount(): return 1\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetUUID(handle): return 'GPU-1'\n"
        "def nvmlDeviceGetName(handle): return 'Model X'\n"
        "def nvmlDeviceGetMemoryInfo(handle): return Values(used=61 * 10**9, total=150 * 10**9)\n"
        "def nvmlDeviceGetUtilizationRates(handle): return Values(gpu=97)\n"
    )
    paths = (str(modules), bench.environment["PYTHONPATH"])
    bench.environment |= {"PYTHONPATH": os.pathsep.join(paths), "UNBROKEN_NVML": "1"}
    bench.environment.pop("CUDA_VISIBLE_DEVICES", None)
    records = made_records(bench.made())
    records.show(state="running")
    assert "gpu 0       Model X: 97% busy, 61.0 GB of 150.0 GB" in look(bench, "status", "it").stdout
    assert status(bench)["gpus"][0]["utilization"] == 0.97
    records.show(state="stopped", exit_code=75)
    records.close()
    assert status(bench)["gpus"] is None


def test_the_exit_code_of_a_check_mirrors_how_the_run_ended(bench: Bench) -> None:
    records = made_records(bench.made())
    for state, code in (("stopped", 75), ("done", 0), ("held", 78)):
        records.show(state=state, exit_code=code)
        done = look(bench, "status", "it", "--check")
        assert f"state       {state}" in done.stdout
        assert done.returncode == code
        assert look(bench, "status", "it").returncode == 0
    records.close()


def test_a_check_of_a_run_that_nothing_keeps_going_is_an_error_unless_something_trains(bench: Bench) -> None:
    records = made_records(bench.made())
    records.show(supervisor=replace(identify_self(), start_ticks=1))
    records.close()
    lost = look(bench, "status", "it", "--check")
    assert lost.returncode == 78
    assert f"hint        `unbroken revive {bench.directory}` takes it over" in lost.stdout
    write_json(bench.directory / "supervisor.json", bench.state() | {"from_a_newer_release": 1})
    assert status(bench)["state"] == "lost"
    (bench.directory / "supervisor.json").unlink()
    assert look(bench, "status", "it", "--check").returncode == 1
    write_json(bench.directory / "writer.json", identify_self().to_json())
    assert look(bench, "status", "it", "--check", "--json").returncode == 0
    assert look(bench, "status", "--check").returncode == 2


def test_stop_says_how_long_the_last_save_took_and_if_there_is_no_time_for_one(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, time
        from pathlib import Path
        from unbroken.rundir.heartbeat import Heartbeat
        from unbroken.rundir.control import read_stop
        run = Path(os.environ["UNBROKEN_RUN_DIR"])
        beat = Heartbeat(run / "attempts" / "0001" / "heartbeat")
        beat.save_seconds = 42.0
        beat.beat(phase="training", step=1, checkpoint_step=1)
        while read_stop(run) is None:
            time.sleep(0.01)
        """,
    )
    assert bench.python(script, "--detach").returncode == 0
    bench.until((bench.directory / "attempts/0001/heartbeat").exists)
    bench.until(lambda: status(bench)["step"] == 1)
    said = look(bench, "stop", "it", "--timeout", "20").stderr
    assert "within 20s, until " in said
    assert "(the last save took 42s; that is too short for one)" in said


def test_the_list_of_runs_loads_nothing_that_it_does_not_need(bench: Bench) -> None:
    bench.made(b"")
    command = [sys.executable, "-P", "-X", "importtime", "-m", "unbroken.cli.main", "status"]
    process = bench.popen(command, stdout=-1, stderr=-1)
    _, said = process.communicate(timeout=60)
    for name in (
        "rich",
        "subprocess",
        "msgspec",
        "unbroken.supervisor.resources.timeline",
        "unbroken.supervisor.resources.gpu",
    ):
        assert f" {name}\n" not in said
