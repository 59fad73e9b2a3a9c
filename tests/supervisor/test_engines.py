"""Under a batch system or a container engine: whose signals, whose restarts, whose clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unbroken.cli.main import main
from unbroken.errors import UsageError
from unbroken.rundir.control import StopRequest
from unbroken.rundir.identity import open_run
from unbroken.supervisor.host.endings import Ending, handed_over, time_to_stop
from unbroken.supervisor.host.engines import (
    ENGINES,
    KUBERNETES,
    SLURM,
    SUBMITIT,
    check_engine,
    engine_of,
    leave_message,
    longest_pause_seconds,
)
from unbroken.supervisor.host.slurm import end_seconds, job_id, parse_end_time, requeue_job, restart_count
from unbroken.supervisor.restart_policy import Decision, hold, stopped_between_attempts
from unbroken.supervisor.surroundings import is_of_a_session

from .conftest import made_records
from .scontrol import Scontrol

if TYPE_CHECKING:
    from .conftest import Bench

OUTSIDE = (77, 70)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm"}, "submitit"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SKYPILOT_TASK_ID": "sky-1"}, "SkyPilot"),
        ({"RAY_JOB_ID": "01000000", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Ray"),
        ({"_CONDOR_SCRATCH_DIR": "/var/lib/condor/1"}, "HTCondor"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "torchrun"),
    ],
)
def test_the_innermost_engine_is_the_one_that_counts(
    environment: dict[str, str], expected: str | None
) -> None:
    found = engine_of(environment)
    assert (found.name if found is not None else None) == expected


def test_a_long_pause_is_not_made_in_an_allotment() -> None:
    assert (longest_pause_seconds(None), longest_pause_seconds(SLURM)) == (600.0, 60.0)


def test_nothing_is_detached_where_all_ends_with_the_command() -> None:
    check_engine(None, detach=True, requeue=False, process_ids=OUTSIDE)
    with pytest.raises(UsageError, match="Slurm ends everything when the batch script ends"):
        check_engine(SLURM, detach=True, requeue=False, process_ids=OUTSIDE)
    for process_ids in ((1, 0), (12, 1), (40, 0)):
        with pytest.raises(UsageError, match="Kubernetes ends everything"):
            check_engine(KUBERNETES, detach=True, requeue=False, process_ids=process_ids)
    # In a terminal of a container that serves something else, such as a notebook.
    check_engine(KUBERNETES, detach=True, requeue=False, process_ids=OUTSIDE)


def test_requeue_is_for_jobs_of_slurm_that_nobody_else_requeues() -> None:
    check_engine(SLURM, detach=False, requeue=True, process_ids=OUTSIDE)
    with pytest.raises(UsageError, match="found itself outside of it"):
        check_engine(None, detach=False, requeue=True, process_ids=OUTSIDE)
    with pytest.raises(UsageError, match="found itself in submitit, which starts jobs again itself"):
        check_engine(SUBMITIT, detach=False, requeue=True, process_ids=OUTSIDE)


def ending(*, at: float, known: float = 0.0, lead: float = 0.0) -> Ending:
    return Ending(who="x", what="ends", at_seconds=at, known_seconds=known, lead_seconds=lead)


@pytest.mark.parametrize(
    ("end", "now", "save", "grace", "expected"),
    [
        # A job of an hour goes on until it needs the grace and the margin of ten seconds,
        (ending(at=3600), 3400, 0, 120, None),
        (ending(at=3600), 3470, 0, 120, 120),
        # or two saves, if those take longer,
        (ending(at=3600), 3190, 200, 120, 400),
        # but no job stops in its first half.
        (ending(at=100), 49, 0, 1000, None),
        (ending(at=100), 50, 0, 1000, 40),
        # The notice of a cloud is obeyed at once,
        (ending(at=120, lead=300), 0, 0, 10, 110),
        (ending(at=30, lead=300), 0, 0, 120, 27),
        # unless it leaves a long time.
        (ending(at=900, lead=300), 0, 0, 10, None),
        (ending(at=900, lead=300), 600, 0, 10, 290),
        # What is near or past leaves as much as is needed to save, for clocks differ and notices come late,
        (ending(at=100, lead=300), 99, 0, 120, 20),
        (ending(at=100, lead=300), 9000, 0, 120, 20),
        (ending(at=100), 200, 0, 120, 20),
        # but not more than any other stop.
        (ending(at=100), 200, 0, 1, 1),
    ],
)
def test_the_stop_is_asked_for_in_time(
    end: Ending, now: float, save: float, grace: float, expected: float | None
) -> None:
    found = time_to_stop(end, now_seconds=now, save_seconds=save, grace_seconds=grace)
    assert found == expected


def test_after_a_preemption_the_run_is_handed_over() -> None:
    preempted = StopRequest(reason="preemption: x", deadline_seconds=None, is_preemption=True)
    killed = Decision(action="stopped", reason="ended by SIGTERM", exit_code=143)
    for decision in (killed, stopped_between_attempts()):
        found = handed_over(decision, preempted)
        assert (found.action, found.exit_code) == ("hand-over", 75)
    assert handed_over(killed, StopRequest(reason="unbroken stop", deadline_seconds=None)) == killed
    assert handed_over(killed, None) == killed
    assert handed_over(hold("unkillable"), preempted).exit_code == 78


def test_the_end_of_a_job_is_read_from_the_environment_or_from_scontrol() -> None:
    assert end_seconds({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1700000000.0
    assert end_seconds({}) is None
    text = "JobState=RUNNING\n   StartTime=2026-01-02T03:04:05 EndTime=2026-01-02T05:04:05 Deadline=N/A"
    assert parse_end_time(text) == time.mktime((2026, 1, 2, 5, 4, 5, 0, 0, -1))
    assert parse_end_time("EndTime=Unknown") is None
    for text in ("slurm_load_jobs error", "EndTime=tomorrow"):
        with pytest.raises(ValueError, match=r"EndTime|tomorrow"):
            parse_end_time(text)
    assert (restart_count({}), restart_count({"SLURM_RESTART_COUNT": "3"})) == (0, 3)


def in_job(bench: Bench, *, seconds: float = 3600, state: str = "RUNNING") -> Scontrol:
    """Let what `bench` starts be a job of Slurm."""
    scontrol = Scontrol(bench.place, seconds=seconds, state=state)
    bench.environment |= {"SLURM_JOB_ID": "77", "PATH": scontrol.path}
    return scontrol


TASK = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


def test_a_task_of_an_array_means_itself_and_not_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol, records = Scontrol(tmp_path), made_records(tmp_path)
    monkeypatch.setenv("PATH", scontrol.path)
    assert end_seconds(TASK) == scontrol.end_seconds
    requeue_job(TASK, records, has_gone_on=True)
    records.close()
    assert scontrol.calls == ["show job 70_3", "show job 70_3", "requeue 70_3"]
    assert job_id({"SLURM_JOB_ID": "7"}) == "7"
    assert job_id({}) is None


def test_the_form_of_times_that_a_user_likes_does_not_hide_the_end_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = Scontrol(tmp_path)
    monkeypatch.setenv("PATH", scontrol.path)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%H:%M")
    assert end_seconds({"SLURM_JOB_ID": "77"}) == scontrol.end_seconds


def start_training(bench: Bench, script: str, *options: str) -> subprocess.Popen[str]:
    viewer = bench.start("run", "--name", "it", *options, "--", sys.executable, script)
    bench.until(lambda: "training" in bench.output())
    return viewer


@pytest.mark.chaos
def test_a_job_stops_by_the_clock_and_goes_back_into_the_queue_once(bench: Bench, training: str) -> None:
    job = in_job(bench, seconds=30)
    bench.environment["SLURM_RESTART_COUNT"] = "2"
    viewer = start_training(bench, training, "--requeue", "--grace", "10")
    (bench.directory / "checkpoints" / "step-00000005").mkdir(parents=True)
    _, said = viewer.communicate(timeout=60)
    assert viewer.returncode == 75, said
    assert time.time() < job.end_seconds
    assert job.calls == ["show job 77", "show job 77", "requeue 77"]
    assert bench.verdict(1)["outcome"] == "stopped"
    assert bench.events("requeued")[0]["restart_count"] == 2
    assert bench.events("run-ended")[0]["action"] == "hand-over"
    assert "Slurm: job 77 ends; " in said
    assert "job 77 goes back into the queue, as 2 times before" in said


def test_the_signal_of_a_batch_script_is_a_preemption_but_a_job_that_saved_nothing_does_not_come_back(
    bench: Bench, training: str
) -> None:
    job = in_job(bench)
    viewer = start_training(bench, training, "--backoff", "500", "--requeue")
    viewer.send_signal(signal.SIGUSR1)
    _, said = viewer.communicate(timeout=30)
    assert viewer.returncode == 75, said
    assert "preemption: Slurm: SIGUSR1 from process" in (bench.directory / "journal.jsonl").read_text()
    assert bench.events("run-ended")[0]["action"] == "hand-over"
    assert "job 77 does not go back into the queue: no newer checkpoint than before" in said
    assert job.calls == ["show job 77"]
    assert bench.read("supervisor-plan.json")["policy"]["cap_seconds"] == 60.0


@pytest.mark.chaos
def test_a_command_of_which_nobody_knows_how_far_it_got_comes_back(bench: Bench) -> None:
    job = in_job(bench)
    script = bench.script("train.py", "import time\nprint('training', flush=True)\ntime.sleep(600)\n")
    viewer = start_training(bench, script, "--requeue")
    viewer.send_signal(signal.SIGUSR1)
    viewer.communicate(timeout=30)
    assert viewer.returncode == 75
    assert job.calls[-1] == "requeue 77"


@pytest.mark.chaos
def test_a_job_that_got_nowhere_does_not_come_back_again_and_again(bench: Bench, training: str) -> None:
    job = in_job(bench)
    open_run(bench.directory, name="it")
    for step in (4, 5):
        (bench.directory / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    viewer = start_training(bench, training, "--requeue")
    # Set aside or pruned: the one before it is the newest, and no progress.
    (bench.directory / "checkpoints" / "step-00000005").rmdir()
    viewer.send_signal(signal.SIGTERM)
    _, said = viewer.communicate(timeout=30)
    assert viewer.returncode == 75
    assert "job 77 does not go back into the queue: no newer checkpoint than before" in said
    assert job.calls == ["show job 77"]


@pytest.mark.chaos
def test_a_job_that_a_person_cancelled_does_not_come_back(bench: Bench, training: str) -> None:
    job = in_job(bench, state="CANCELLED")
    viewer = start_training(bench, training, "--requeue")
    (bench.directory / "checkpoints" / "step-00000005").mkdir(parents=True)
    viewer.send_signal(signal.SIGTERM)
    _, said = viewer.communicate(timeout=30)
    assert viewer.returncode == 75
    assert "job 77 does not go back into the queue: it is CANCELLED" in said
    assert job.calls == ["show job 77", "show job 77"]


@pytest.mark.chaos
def test_a_stop_by_a_person_requeues_nothing(bench: Bench, training: str) -> None:
    job = in_job(bench)
    viewer = start_training(bench, training, "--requeue")
    assert bench.cli("stop", "it").returncode == 0
    viewer.communicate(timeout=30)
    assert bench.events("run-ended")[0]["action"] == "stopped"
    assert job.calls == ["show job 77"]


@pytest.mark.parametrize(
    ("variable", "options", "refusal"),
    [
        ("SLURM_JOB_ID", ("--detach",), "--detach: Slurm ends everything when the batch script ends"),
        ("TORCHELASTIC_RUN_ID", (), "found itself in one of its ranks (TORCHELASTIC_RUN_ID is set)"),
        ("RAY_JOB_ID", ("--requeue",), "--requeue: expected a job of Slurm, found itself in Ray"),
    ],
)
def test_what_an_engine_does_not_allow_is_refused_before_anything_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    options: tuple[str, ...],
    refusal: str,
) -> None:
    for name in [name for engine in ENGINES for name in engine.variables]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *options, "--", "true"]) == 2
    assert refusal in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_why_a_container_ended_is_left_where_kubernetes_looks(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "UNBROKEN_TERMINATION_LOG": str(log)}
    leave_message(environment, "stopped", "nobody made the file", hint="")
    assert not log.exists()
    log.touch()
    leave_message({**environment, "KUBERNETES_SERVICE_HOST": ""}, "stopped", "not there", hint="")
    assert log.read_text() == ""
    leave_message(environment, "held", "ended twice", hint="look at it")
    assert log.read_text() == "held: ended twice\nhint: look at it"
    leave_message(environment, "held", "x" * 10_000, hint="")
    assert log.read_text().startswith("held: xxx")
    assert log.stat().st_size == 4096


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def children(process_id: int) -> list[int]:
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(number) for number in text.split()]


def is_zombie(process_id: int) -> bool:
    stat = Path(f"/proc/{process_id}/stat").read_bytes()
    return stat.rpartition(b")")[2].split()[0] == b"Z"


def test_as_process_1_of_a_container_it_collects_orphans_and_obeys_sigterm(
    bench: Bench, training: str
) -> None:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], check=False).returncode != 0:
        pytest.skip("no process namespace of our own is permitted here")
    log = bench.place / "termination-log"
    log.touch()
    bench.environment |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "UNBROKEN_TERMINATION_LOG": str(log)}
    command = [*bench.command("run", "--name", "it", "--grace", "20", "--", sys.executable, training)]
    # An orphan of somebody else, such as `kubectl exec` leaves behind: it becomes a child of process 1.
    shell = ["sh", "-c", 'sleep 1 & exec "$@"', "sh", *command]
    outer = bench.popen([*UNSHARE, *shell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    bench.until(lambda: "training" in bench.output())
    (first,) = children(outer.pid)
    bench.until(lambda: len(children(first)) == 1)
    assert not any(is_zombie(child) for child in children(first))
    os.kill(first, signal.SIGTERM)
    said, _ = outer.communicate(timeout=30)
    assert outer.returncode == 75, said
    assert "preemption: Kubernetes: SIGTERM" in (bench.directory / "journal.jsonl").read_text()
    assert log.read_text().startswith("stopped: the run said that its state is saved")


def test_what_an_engine_sets_is_not_taken_over_by_whoever_revives_the_run() -> None:
    assert all(is_of_a_session(name) for engine in ENGINES for name in engine.variables)
    assert is_of_a_session("SLURM_JOB_END_TIME")
