"""Runs that make no progress: told from slow ones, looked at, ended and started again."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from unbroken.cli.run import run
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Heartbeat, read_heartbeat
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify
from unbroken.supervisor.hangs.hang_policy import HangPolicy
from unbroken.supervisor.hangs.stacks import innermost, read_signs
from unbroken.supervisor.hangs.watchdog import Watchdog, read_pace
from unbroken.supervisor.records import Records
from unbroken.supervisor.states import Snapshot
from unbroken.supervisor.watcher import EndNow, Look, Started, Want

if TYPE_CHECKING:
    from .conftest import Bench


def test_the_function_where_it_stands_is_read_from_a_dump() -> None:
    dump = (
        "Thread 0x00007f0a (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 331 in wait\n\n'
        "Current thread 0x00007f0b (most recent call first):\n"
        '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
        '  File "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 9 in _next\n'
        '  File "/home/me/train.py", line 12 in one_epoch\n'
        '  File "/home/me/train.py", line 40 in <module>\n'
    )
    assert innermost(dump) == "/home/me/train.py:12 in one_epoch"
    assert innermost("") == ""


def test_the_signs_of_a_process_tell_what_it_waits_for() -> None:
    (found,) = [sign for sign in read_signs([os.getpid(), 1]) if sign.process.process_id == 1]
    assert found.cpu_seconds >= 0
    assert str(found).startswith("process 1 (")


TRAIN = """
import os, sys, threading, time, unbroken

def stuck_in_the_data(seconds):
    time.sleep(seconds)

def tick():
    while True:
        time.sleep(0.01)

threading.Thread(target=tick, daemon=True).start()
first = os.environ["UNBROKEN_ATTEMPT"] == "1"
with unbroken.Run(save=[unbroken.EverySteps(1)]) as run:
    for _ in run.epochs(1):
        for number in run.batches(range(8)):
            if run.step_count == 5 and first:
                print("stuck", flush=True)
                stuck_in_the_data(float(sys.argv[1]))
            # Slow enough to be seen, once it moves again.
            time.sleep(0.4 if run.step_count >= 5 else 0)
            run.step()
"""


def events(bench: Bench) -> list[dict[str, Any]]:
    return list(read_events(bench.directory / layout.JOURNAL_FILE))


def kinds(bench: Bench) -> list[str]:
    wanted = ("slow", "hang-suspected", "moves-again")
    return [event["kind"] for event in events(bench) if event["kind"] in wanted]


def test_a_loop_that_hangs_is_looked_at_ended_and_started_again(bench: Bench) -> None:
    """A thread of it ticks all the time."""
    command = (sys.executable, bench.script("train.py", TRAIN), "600")
    done = bench.run(*command, options=("--hang-after", "2"))
    assert done.returncode == 0, done.stderr
    verdict = bench.verdict(1)
    assert (verdict["outcome"], verdict["kind"]) == ("hung", "hang")
    (because,) = verdict["evidence"][:1]
    assert "no step for" in because
    assert "at step 5" in because
    assert "train.py:5 in stuck_in_the_data" in because
    assert kinds(bench)[-2:] == ["slow", "hang-suspected"]
    stacks = bench.directory / "attempts/0001/stacks"
    (dump,) = stacks.glob("rank0-*.txt")
    assert "stuck_in_the_data" in dump.read_text()
    assert "nanosleep" in (stacks / "processes.txt").read_text()
    # Nobody asked the second attempt for its stacks.
    assert list((bench.directory / "attempts/0002/stacks").iterdir()) == []
    assert bench.attempts() == 2
    assert bench.verdict(2)["outcome"] == "completed"


@pytest.mark.chaos
def test_the_stacks_of_forked_workers_follow_those_of_the_trainer(bench: Bench) -> None:
    train = bench.script(
        "train.py",
        """
        import multiprocessing, time, unbroken
        def read_a_sample():
            time.sleep(600)
        with unbroken.Run() as run:
            for _ in range(5):
                run.step()
            worker = multiprocessing.get_context("fork").Process(target=read_a_sample, daemon=True)
            worker.start()
            worker.join()
        """,
    )
    done = bench.run(sys.executable, train, options=("--hang-after", "3", "--max-restarts", "0"))
    assert done.returncode == 78, done.stderr
    (dump,) = (bench.directory / "attempts/0001/stacks").glob("rank0-*.txt")
    assert "in read_a_sample" in dump.read_text()
    assert "train.py:10 in <module>" in bench.verdict(1)["evidence"][0]


@pytest.mark.chaos
def test_a_slow_loop_is_told_of_and_left_alone(bench: Bench) -> None:
    """It is slow until that is told, however late the supervisor looks."""
    slow = """
        from pathlib import Path
        while '"slow"' not in (Path(os.environ["UNBROKEN_RUN_DIR"]) / "journal.jsonl").read_text():
            time.sleep(0.05)
    """
    train = TRAIN.replace("\n    time.sleep(seconds)\n", textwrap.indent(textwrap.dedent(slow), "    "))
    done = bench.run(sys.executable, bench.script("train.py", train), "0", options=("--hang-after", "5"))
    assert done.returncode == 0, done.stderr
    assert bench.attempts() == 1
    assert kinds(bench) == ["slow", "moves-again"]


class Watched:
    """A process that only sleeps, as the one that trains, and looks at it at times after its last beat."""

    def __init__(self, bench: Bench, policy: HangPolicy) -> None:
        self.process = bench.popen(["sleep", "60"])
        identity = identify(self.process.pid)
        assert identity is not None
        snapshot = Snapshot(
            state="running",
            reason="",
            run_id="",
            name="it",
            command=(),
            supervisor=identity,
            started_seconds=0,
            changed_seconds=0,
            grace_seconds=1,
        )
        place = layout.attempt_directory(bench.directory, 1)
        place.mkdir(parents=True)
        self.records = Records(bench.directory, snapshot)
        started = Started(attempt=1, directory=place, run_directory=bench.directory, leader=self.process.pid)
        self.watchdog = Watchdog(started, policy, self.records)
        heartbeat = Heartbeat(place / layout.HEARTBEAT)
        heartbeat.progress = 99
        heartbeat.beat(phase="training", step=40, checkpoint_step=30)
        heartbeat.close()
        beat = read_heartbeat(place / layout.HEARTBEAT)
        assert beat is not None
        self.beat = replace(beat, process_id=self.process.pid)
        self.sees_no_beat = False

    def look(self, silent_seconds: float, *, is_stop_asked: bool = False) -> Want:
        now = self.beat.monotonic_seconds + silent_seconds
        beat = None if self.sees_no_beat else self.beat
        look = Look(now_seconds=now, beat=beat, is_stop_asked=is_stop_asked, has_leader=True)
        return self.watchdog.look(look)

    def step(self, silent_seconds: float) -> None:
        at, step = self.beat.monotonic_seconds + silent_seconds, self.beat.step + 1
        progress = self.beat.progress + 1
        self.beat = replace(self.beat, monotonic_seconds=at, step=step, progress=progress)

    def close(self) -> None:
        self.watchdog.end()
        self.records.close()
        self.process.kill()
        self.process.wait()


def test_enforcement_can_be_off_and_the_state_still_says_so(bench: Bench) -> None:
    with closing(Watched(bench, HangPolicy(step_seconds=10.0, is_enforced=False))) as watched:
        assert [watched.look(silent) for silent in range(0, 40, 2)] == [None] * 20
        assert kinds(bench) == ["slow", "hang-suspected"]
        assert bench.state()["reason"].startswith("no step for 8 s; the limit is 10 s")
        # A stop has its own deadline.
        assert watched.look(40, is_stop_asked=True) is None
        assert bench.state()["reason"] == ""


def test_a_run_is_not_ended_for_a_time_in_which_nothing_could_run(bench: Bench) -> None:
    """A container that was paused, a machine that slept: the first look after it ended a healthy run."""
    with closing(Watched(bench, HangPolicy())) as watched:
        assert [watched.look(at) for at in (0, 0.5, 1, 6000, 6000.5)] == [None] * 5
    assert kinds(bench) == []


def test_nothing_is_ended_before_it_was_looked_into_twice(bench: Bench) -> None:
    with closing(Watched(bench, HangPolicy(step_seconds=100.0))) as watched:
        looks = {at / 2: watched.look(at / 2) for at in range(250)}
    ended_at = [at for at, want in looks.items() if want is not None]
    assert ended_at[0] == 100.0
    found = looks[100.0]
    assert isinstance(found, EndNow)
    assert "0.0 s of processor time" in found.because
    assert kinds(bench) == ["slow", "hang-suspected"]
    assert read_pace(bench.directory).ended_step == 40


def test_a_step_that_was_slow_is_told_of_and_all_is_well_after_it(bench: Bench) -> None:
    with closing(Watched(bench, HangPolicy(step_seconds=10.0))) as watched:
        assert [watched.look(silent) for silent in (0, 2, 4, 6)] == [None] * 4
        assert bench.state()["reason"].startswith("no step for 6 s; the limit is 10 s")
        watched.step(6.5)
        assert [watched.look(silent) for silent in (0, 2, 4)] == [None] * 3
        assert bench.state()["reason"] == ""
    assert kinds(bench) == ["slow", "moves-again"]


def test_what_is_stopped_by_job_control_does_not_hang_and_has_half_of_its_time_after_it(bench: Bench) -> None:
    with closing(Watched(bench, HangPolicy(step_seconds=10.0))) as watched:
        watched.process.send_signal(signal.SIGSTOP)
        bench.until(lambda: read_signs([watched.process.pid])[0].process.state == "T")
        assert [watched.look(silent) for silent in range(0, 60, 2)] == [None] * 30
        watched.process.send_signal(signal.SIGCONT)
        bench.until(lambda: read_signs([watched.process.pid])[0].process.state != "T")
        wants = [watched.look(silent) for silent in range(60, 80, 2)]
    # At 60 it may have been looked at 5 s before for the last time.
    assert wants[:2] == [None] * 2
    assert isinstance(next(want for want in wants if want is not None), EndNow)


def test_what_is_not_known_to_use_the_library_is_never_ended_for_its_silence(bench: Bench) -> None:
    with closing(Watched(bench, HangPolicy(step_seconds=1.0))) as watched:
        watched.sees_no_beat = True
        assert [watched.look(silent) for silent in range(0, 40000, 4)] == [None] * 10000


@pytest.mark.chaos
def test_a_run_that_is_stopped_by_job_control_does_not_hang(bench: Bench) -> None:
    supervisor = bench.start(
        *("run", "--name", "it", "--hang-after", "2", "--"),
        *(sys.executable, bench.script("train.py", TRAIN), "0.2"),
    )
    bench.until(lambda: "stuck" in bench.output())
    leader = bench.state()["leader"]["process_id"]
    os.kill(leader, signal.SIGSTOP)
    until = time.monotonic() + 4.0
    bench.until(lambda: time.monotonic() > until)
    os.kill(leader, signal.SIGCONT)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0
    assert bench.attempts() == 1
    assert "hang-suspected" not in kinds(bench)


def test_a_stop_that_is_not_served_in_time_says_what_the_run_did_instead(bench: Bench) -> None:
    train = bench.script(
        "evaluate.py",
        """
        import time, unbroken
        with unbroken.Run(save=[unbroken.EverySteps(3)]) as run:
            for _ in range(5):
                run.step()
            run.record(accuracy=0.5)
            print("evaluates", flush=True)
            time.sleep(600)
        """,
    )
    supervisor = bench.start("run", "--name", "it", "--grace", "1", "--", sys.executable, train)
    bench.until(lambda: "evaluates" in bench.output())
    supervisor.send_signal(signal.SIGTERM)
    supervisor.communicate(timeout=60)
    (because,) = bench.verdict(1)["evidence"][:1]
    assert "its time to save and stop was over: SIGTERM from process" in because
    assert because.endswith("it was evaluating at step 5; 2 steps are lost")


@pytest.mark.chaos
def test_a_command_without_the_library_is_never_ended_for_its_silence(bench: Bench) -> None:
    done = bench.run(sys.executable, "-c", "import time; time.sleep(2.5)", options=("--hang-after", "0.5"))
    assert done.returncode == 0, done.stderr
    assert bench.attempts() == 1


@pytest.mark.parametrize("value", ["0", "-1", "never", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(value: str) -> None:
    error = CliRunner().invoke(run, [f"--hang-after={value}", "--", sys.executable, "-c", "0"]).exception
    assert isinstance(error, UsageError)
    assert error.message.startswith(f"--hang-after {value}: expected seconds above 0")


def test_a_process_that_offers_no_stacks_is_not_signalled(bench: Bench, tmp_path: Path) -> None:
    """The signal would end it: a number may belong to a stranger by now."""
    from unbroken.rundir.stack_files import STACK_SIGNAL, StackFile, catches

    assert STACK_SIGNAL is not None
    assert not catches(os.getpid(), STACK_SIGNAL)
    offered = StackFile(tmp_path, 3)
    assert catches(os.getpid(), STACK_SIGNAL)
    os.kill(os.getpid(), STACK_SIGNAL)
    offered.close()
    (dump,) = (tmp_path / "stacks").iterdir()
    assert dump.name == f"rank3-{os.getpid()}.txt"
    assert innermost(dump.read_text()).endswith("in test_a_process_that_offers_no_stacks_is_not_signalled")
    assert not catches(os.getpid(), STACK_SIGNAL)
    # One that is late does no harm.
    os.kill(os.getpid(), STACK_SIGNAL)
