"""Runs that make no progress: told from slow ones, looked at, ended and started again."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Heartbeat, read_heartbeat
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify
from unbroken.supervisor.hang_policy import (
    Course,
    HangPolicy,
    Limit,
    Pace,
    Sight,
    advance,
    begin,
    degree,
    limit,
)
from unbroken.supervisor.records import Records
from unbroken.supervisor.stacks import innermost, read_signs
from unbroken.supervisor.states import Snapshot
from unbroken.supervisor.watchdog import Watchdog
from unbroken.supervisor.watcher import Look, Started

if TYPE_CHECKING:
    from .conftest import Bench

LEARNED = HangPolicy()
MINUTE, HOUR = 60.0, 3600.0


def course(looks: Iterable[tuple[float, str, int, int]], pace: Pace | None = None) -> Course:
    """Return the course after looks at (time, phase, step, progress)."""
    found = begin(pace or Pace(), 0.0)
    for now, phase, step, progress in looks:
        sight = Sight(now_seconds=now, beat_seconds=now, phase=phase, step=step, progress=progress)
        found = advance(found, sight)
    return found


def stepping(seconds: float, steps: int, start: float = 10.0) -> list[tuple[float, str, int, int]]:
    return [
        (1.0, "restoring", 0, 0),
        *((start + seconds * n, "training", n, 2 * n) for n in range(1, steps + 1)),
    ]


class TestLimits:
    @pytest.mark.parametrize(
        ("seconds", "steps", "expected"),
        [
            # Ten times the slowest of a hundred steps, within bounds; nothing is known before fifty.
            (30.0, 100, 300.0),
            (0.1, 100, 3 * MINUTE),
            (1000.0, 100, HOUR),
            (30.0, 40, HOUR),
        ],
    )
    def test_a_step_is_measured_by_the_steps_before_it(
        self, seconds: float, steps: int, expected: float
    ) -> None:
        allowed = limit(LEARNED, course(stepping(seconds, steps)))
        assert allowed == Limit(seconds=expected, cap_seconds=HOUR)

    def test_one_slow_step_in_a_hundred_does_not_count_and_two_do(self) -> None:
        def after(slow: int) -> float:
            pace = Pace(intervals=(30.0,) * (200 - slow) + (200.0,) * slow, steps=200)
            return limit(LEARNED, replace(course([]), phase="training", pace=pace)).seconds

        assert (after(2), after(3)) == (300.0, 2000.0)

    def test_warm_up_and_what_is_no_training_are_no_steps(self) -> None:
        looks = [
            *stepping(30.0, 60),
            # An evaluation of an hour between two steps, and a save of ten minutes.
            (5000.0, "evaluating", 60, 121),
            (8600.0, "training", 60, 122),
            (8630.0, "training", 61, 124),
            (8640.0, "saving", 61, 124),
            (9240.0, "training", 61, 124),
            (9270.0, "training", 62, 126),
        ]
        pace = course(looks).pace
        assert max(pace.intervals) == pytest.approx(30.0)
        # The first is not seen to begin, five more are warm-up.
        assert pace.steps < 60

    @pytest.mark.parametrize("phase", ["startup", "restoring", "compiling"])
    def test_a_start_may_take_an_hour_as_long_as_nothing_is_known(self, phase: str) -> None:
        found = replace(course([]), phase=phase)
        assert limit(LEARNED, found).seconds == HOUR
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 20.0}))).seconds == 10 * MINUTE
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 200.0}))).seconds == 2000.0

    @pytest.mark.parametrize("phase", ["evaluating", "saving", "stopping"])
    def test_evaluations_and_saves_are_measured_by_the_longest_so_far(self, phase: str) -> None:
        found = replace(course([]), phase=phase)
        assert limit(LEARNED, found).seconds == 6 * HOUR
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 2.0}))).seconds == 10 * MINUTE
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 900.0}))).seconds == 9000.0

    def test_a_limit_of_the_user_is_for_steps_alone_and_is_obeyed_as_given(self) -> None:
        policy = HangPolicy(step_seconds=2.0)
        assert limit(policy, course(stepping(30.0, 100))) == Limit(seconds=2.0, cap_seconds=2.0)
        assert limit(policy, replace(course([]), phase="evaluating")).seconds == 6 * HOUR
        assert degree(3.0, Limit(seconds=2.0, cap_seconds=2.0), moves=True) == "hung"

    @pytest.mark.parametrize("phase", ["disk-full", "done"])
    def test_a_disk_that_is_full_is_no_hang_and_neither_is_what_follows_training(self, phase: str) -> None:
        assert limit(LEARNED, replace(course([]), phase=phase)).seconds == math.inf

    def test_what_was_learned_is_kept_over_attempts_and_the_start_has_its_own_limit_again(self) -> None:
        pace = Pace.from_json(course(stepping(30.0, 100)).pace.to_json())
        again = course([(1.0, "restoring", 100, 0), (2.0, "training", 100, 0)], pace)
        assert again.phase == "compiling"
        assert limit(LEARNED, again).seconds == 10 * MINUTE
        assert limit(LEARNED, course(stepping(30.0, 3), pace)).seconds == 300.0


class TestDegrees:
    @pytest.mark.parametrize(
        ("silent", "moves", "expected"),
        [
            (29, False, "fine"),
            (30, False, "slow"),
            (60, False, "suspect"),
            (89, False, "suspect"),
            (90, False, "hung"),
            # What computes or reads has until the cap: a limit that was learned is a guess.
            (90, True, "suspect"),
            (3599, True, "suspect"),
            (3600, True, "hung"),
        ],
    )
    def test_a_silence_is_told_then_looked_at_then_ended(
        self, silent: float, moves: bool, expected: str
    ) -> None:
        assert degree(silent, Limit(seconds=60, cap_seconds=3600), moves=moves) == expected

    def test_progress_is_a_batch_or_a_step_and_not_a_beat(self) -> None:
        looks = [*stepping(1.0, 10), (100.0, "training", 10, 20), (200.0, "training", 10, 20)]
        assert course(looks).since_seconds == 20.0
        assert course([*looks, (300.0, "training", 10, 21)]).since_seconds == 300.0


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


def test_a_slow_loop_is_told_of_and_left_alone(bench: Bench) -> None:
    done = bench.run(sys.executable, bench.script("train.py", TRAIN), "3.5", options=("--hang-after", "6"))
    assert done.returncode == 0, done.stderr
    assert bench.attempts() == 1
    assert kinds(bench) == ["slow", "moves-again"]


def test_enforcement_can_be_off_and_the_state_still_says_so(bench: Bench) -> None:
    process = bench.popen(["sleep", "60"])
    identity = identify(process.pid)
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
    attempt = layout.attempt_directory(bench.directory, 1)
    attempt.mkdir(parents=True)
    started = Started(attempt=1, directory=attempt, run_directory=bench.directory, leader=process.pid)
    records = Records(bench.directory, snapshot)
    watchdog = Watchdog(started, HangPolicy(step_seconds=10.0, is_enforced=False), records)
    heartbeat = Heartbeat(attempt / "heartbeat")
    heartbeat.progress = 99
    heartbeat.beat(phase="training", step=40, checkpoint_step=30)
    beat = read_heartbeat(attempt / "heartbeat")
    assert beat is not None
    beat = replace(beat, process_id=process.pid)
    for silent in (0, 6, 11, 100):
        now = beat.monotonic_seconds + silent
        look = Look(now_seconds=now, beat=beat, is_stop_asked=False, has_leader=True)
        assert watchdog.look(look) is None
    assert kinds(bench) == ["slow", "hang-suspected"]
    assert bench.state()["reason"].startswith("no step for 11 s; the limit is 10 s")
    # A stop has its own deadline.
    assert watchdog.look(replace(look, is_stop_asked=True)) is None
    assert bench.state()["reason"] == ""
    watchdog.end()
    heartbeat.close()
    records.close()
    process.kill()
    process.wait()


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


def test_a_command_without_the_library_is_never_ended_for_its_silence(bench: Bench) -> None:
    done = bench.run(sys.executable, "-c", "import time; time.sleep(2.5)", options=("--hang-after", "0.5"))
    assert done.returncode == 0, done.stderr
    assert bench.attempts() == 1


@pytest.mark.parametrize("value", ["0", "-1", "never", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(bench: Bench, value: str) -> None:
    done = bench.cli("run", f"--hang-after={value}", "--", sys.executable, "-c", "0")
    assert done.returncode == 2
    assert "--hang-after" in done.stderr


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
