"""Memory that runs out: seen in time, acted on once, and never where there is no danger."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unbroken
from unbroken.errors import UsageError
from unbroken.frameworks.torch.memory import DeviceMemory
from unbroken.rundir import layout
from unbroken.rundir.host_memory import Use
from unbroken.rundir.last_words import LastWords, write_last_words
from unbroken.training import memory_guard
from unbroken.training.memory_guard import (
    REASON,
    MemoryGuard,
    Sample,
    Watched,
    is_in_danger,
    is_worth_it,
    seconds_left,
)

from ..out_of_memory import MEBIBYTE, Group, memory_group, one_at_a_time
from .processes import step_events
from .runs import words_of
from .test_supervised import verdicts

SCRIPT = Path(__file__).with_name("leaking_script.py")
GB = 10**9


def series(*gigabytes: float, every: float = 1.0, limit: float = 64.0) -> list[Sample]:
    return [
        Sample(
            seconds=index * every,
            use=Use(used_bytes=int(used * GB), limit_bytes=int(limit * GB), own_bytes=int(used * GB)),
        )
        for index, used in enumerate(gigabytes)
    ]


def ramp(start: float, per_second: float, count: int = 24) -> list[float]:
    return [start + per_second * index for index in range(count)]


class Slow:
    """A memory of 64 GB, looked at twice a second."""

    name = "this test"
    every_seconds = 0.5

    def __init__(self, start_gb: float, per_second: float) -> None:
        self.gigabytes = start_gb - 0.5 * per_second
        self.per_look = 0.5 * per_second
        self.looks = 0

    def read(self) -> Use | None:
        self.looks += 1
        self.gigabytes += self.per_look
        # Other things take some now and then.
        used = int((self.gigabytes + 0.02 * (self.looks % 7 == 0)) * GB)
        return Use(used_bytes=used, limit_bytes=64 * GB, own_bytes=used)

    def close(self) -> None:
        pass


SAWTOOTH = [61.0, 61.2, 63.0, 61.1, 61.0, 61.2, 63.1, 61.0] * 3


@pytest.mark.parametrize(
    ("found", "horizon", "expected"),
    [
        (series(*ramp(60, 0.15)), 10, True),
        (series(*ramp(30, 0.5)), 10, False),
        (series(*ramp(62, 0.001)), 10, False),
        (series(*([63.0] * 24)), 10, False),
        (series(*SAWTOOTH), 10, False),
        (series(*[used + 0.015 * index for index, used in enumerate(SAWTOOTH)]), 45, True),
        (series(*reversed(ramp(60, 0.15))), 10, False),
        (series(60, 61, 62, 63, 63.9), 10, False),
        (series(*ramp(60, 0.15)), 60, False),
    ],
    ids=[
        "it grows, and a few saves from now it is full",
        "it grows, but most of it is free",
        "it grows, but slowly",
        "it is nearly full, and does not grow",
        "it is nearly full, and goes up and down",
        "it goes up and down, a little higher each time",
        "it shrinks",
        "it was looked at too few times",
        "it was looked at for too short a time for saves that take so long",
    ],
)
def test_danger_is_a_limit_that_is_near_in_bytes_and_in_time(
    found: Sequence[Sample], horizon: float, expected: bool
) -> None:
    assert is_in_danger(found, horizon) is expected


def test_a_leak_that_is_slow_is_stopped_when_hardly_anything_is_left() -> None:
    """64 GB, of which 3 MB a second are lost: a few saves would leave it to the last megabytes."""
    lost = 0.003
    watched = Watched(Slow(start_gb=62.0, per_second=lost))
    now = 0.0
    while watched.look(now, 1.5) is None:
        now += 0.5
        assert 62.0 + lost * now < 63.5, "too late"
    assert 62.0 + lost * now > 0.98 * 64


def test_a_run_that_uses_nearly_all_and_stays_there_is_left_alone() -> None:
    watched = Watched(Slow(start_gb=63.2, per_second=0.0))
    assert not any(watched.look(0.5 * number, 1.5) for number in range(7200))


def test_the_time_left_counts_from_the_most_that_was_used() -> None:
    assert seconds_left(series(*ramp(10, 1, 9), limit=28)) == pytest.approx(10)
    assert seconds_left(series(10, 11, 20, 13, 14, 15, 16, 17, 18, limit=28)) == pytest.approx(8, rel=0.1)
    assert seconds_left(series(*([10.0] * 9))) is None


@pytest.mark.parametrize(
    ("stops", "lived", "expected"),
    [(0, 1, True), (2, 1, True), (3, 1, False), (3, 400, True), (9, 400, True)],
)
def test_a_stop_that_did_not_last_three_times_is_only_worth_it_after_a_while(
    stops: int, lived: float, expected: bool
) -> None:
    assert is_worth_it(stops, lived) is expected


class Leak:
    """A memory of 1 GB that is 60 MB fuller each second; its own clock."""

    name = "this test"
    every_seconds = 0.2

    def __init__(self, start_gb: float = 0.6) -> None:
        self.seconds = 0.0
        self.start_gb = start_gb
        self.readings = 0
        self.closed = 0

    def now(self) -> float:
        self.seconds += 0.05
        return self.seconds

    def read(self) -> Use | None:
        self.readings += 1
        used = int((self.start_gb + 0.06 * self.seconds) * GB)
        return Use(used_bytes=used, limit_bytes=GB, own_bytes=used)

    def close(self) -> None:
        self.closed += 1


def guard_of(leak: Leak, attempts: Path, *, policy: Any = "auto", number: int = 1) -> MemoryGuard:
    directory = layout.attempt_directory(attempts, number)
    return MemoryGuard(policy, directory, save_seconds=lambda: 0.1, memories=lambda: [leak], now=leak.now)


def until_reason(guard: MemoryGuard, leak: Leak) -> str | None:
    while leak.seconds < 7:
        reason = guard.stop_reason()
        if reason is not None:
            return reason
    return None


def test_under_a_supervisor_the_guard_gives_a_reason_to_stop_before_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layout.ATTEMPT_VARIABLE, "1")
    leak = Leak()
    guard = guard_of(leak, tmp_path)
    reason = until_reason(guard, leak)
    assert reason is not None
    assert reason.startswith("the memory guard: 0.9")
    assert "of 1.00 GB of this test" in reason
    # At most one reading in 0.2 seconds, though it was asked four times as often.
    assert leak.readings <= leak.seconds / 0.2 + 1
    guard.close()
    assert leak.closed == 1
    assert guard.stop_reason() is None


def test_without_a_supervisor_it_saves_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leak = Leak()
    guard = guard_of(leak, tmp_path)
    assert until_reason(guard, leak) is None
    assert [guard.take_save(), guard.take_save()] == [True, False]
    assert capsys.readouterr().err.count("saving; under `unbroken run` it would be restarted") == 1
    leak = Leak()
    assert until_reason(guard_of(leak, tmp_path, policy="stop"), leak) is not None
    leak = Leak()
    assert until_reason(guard_of(leak, tmp_path, policy="off"), leak) is None
    assert leak.readings == 0


def test_after_three_attempts_that_it_stopped_it_leaves_a_young_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(layout.ATTEMPT_VARIABLE, "4")
    for number in (1, 2, 3):
        words = LastWords(ending="stopped", step=number, reason=f"{REASON}full")
        write_last_words(layout.attempt_directory(tmp_path, number), words)
    leak = Leak()
    assert until_reason(guard_of(leak, tmp_path, number=4), leak) is None
    assert "the last 3 attempts were stopped for that already" in capsys.readouterr().err
    words = LastWords(ending="failed", step=2, kind="ValueError")
    write_last_words(layout.attempt_directory(tmp_path, 2), words)
    leak = Leak()
    assert until_reason(guard_of(leak, tmp_path, number=4), leak) is not None


def test_what_torch_knows_of_a_device_decides_by_the_peak_of_its_tensors() -> None:
    """A stand-in for torch.cuda: 10 GB, the allocator keeps 6, of which tensors took 5 at most."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=lambda: (3 * GB, 10 * GB),
        memory_reserved=lambda: 6 * GB,
        max_memory_allocated=lambda: 5 * GB,
    )
    assert DeviceMemory(cuda).read() == Use(used_bytes=6 * GB, limit_bytes=10 * GB, own_bytes=5 * GB)
    cuda.is_initialized = lambda: False
    assert DeviceMemory(cuda).read() is None
    assert DeviceMemory().read() is None


def test_a_device_whose_tensors_take_more_with_every_step_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak = Leak(start_gb=0.3)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=lambda: (GB // 10, GB),
        memory_reserved=lambda: GB * 9 // 10,
        max_memory_allocated=lambda: int((0.3 + 0.02 * leak.seconds) * GB),
    )
    monkeypatch.setenv(layout.ATTEMPT_VARIABLE, "1")
    guard = MemoryGuard(
        "auto",
        layout.attempt_directory(tmp_path, 1),
        save_seconds=lambda: 2.0,
        memories=lambda: [DeviceMemory(cuda)],
        now=leak.now,
    )
    while (reason := guard.stop_reason()) is None:
        assert leak.seconds < 35, "too late: it is full"
    assert "of 1.00 GB of the device's memory" in reason


def test_a_policy_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected memory_guard to be one of"):
        unbroken.Run(tmp_path, memory_guard="sometimes")  # type: ignore[arg-type]


@pytest.fixture
def group() -> Iterator[Group]:
    with memory_group(160 * MEBIBYTE) as found:
        yield found


def supervised(group: Group, run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    unbroken_run = [sys.executable, "-m", "unbroken.cli.main", "run", "--run-dir", str(run_dir)]
    training = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        group.command([*unbroken_run, "--backoff", "0.01", "--", *training]),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "XDG_STATE_HOME": str(run_dir.parent / "state")},
    )


class Filling(Leak):
    """Fuller with every look, whatever the time."""

    every_seconds = 0.0

    def read(self) -> Use | None:
        self.seconds += 0.5
        return super().read()


def test_the_loop_is_left_with_the_state_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leak = Filling()
    monkeypatch.setattr(memory_guard, "_memories", lambda: [leak])
    counters = {"seen": 0}

    def train() -> None:
        with unbroken.Run(tmp_path / "run", memory_guard="stop", counters=counters) as run:
            for _epoch in run.epochs(1):
                for _number in run.batches(range(200)):
                    counters["seen"] += 1
                    time.sleep(0.05)
                    run.step()

    with pytest.raises(SystemExit) as stopped:
        train()
    assert stopped.value.code == 75
    words = words_of(tmp_path / "run")
    assert (words.ending, words.step) == ("stopped", counters["seen"])
    assert words.reason.startswith(REASON)
    assert words.checkpoint == layout.checkpoint_name(counters["seen"])
    assert leak.closed == 1


@pytest.mark.chaos
def test_a_leaking_run_is_stopped_saved_and_restarted_and_its_result_is_that_of_one_that_does_not_leak(
    group: Group, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = supervised(group, run_dir, "--leak-kb", "256")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict["outcome"] for verdict in verdicts(run_dir)] == ["stopped", "completed"]
    assert f"stopped by {REASON}" in done.stdout
    # No step is done twice, and each state is that of a run that nothing happens to.
    found = [(event["step"], event["metrics"]["total"]) for event in step_events(run_dir)]
    generator, total, expected = random.Random(7), 0.0, []
    for step in range(1, 501):
        total = 0.9 * total + generator.random()
        expected.append((step, total))
    assert found == expected


@pytest.mark.chaos
def test_without_the_guard_the_kernel_ends_it_and_steps_are_done_twice(group: Group, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with one_at_a_time():
        done = supervised(group, run_dir, "--leak-kb", "256", "--guard", "off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict["cause"] for verdict in verdicts(run_dir)] == ["memory", ""]
    assert len(step_events(run_dir)) > 500
