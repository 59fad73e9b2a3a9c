"""Requests that go on while weights come: none sees two sets, none fails, none goes back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore

from ..training.runs import flip
from .stamped import Requests, Stamped, eventually, save, stamp


@contextmanager
def trainer(act: Callable[[], None]) -> Iterator[int]:
    """Do `act` in a process of its own; forked before there are threads, so that it need not import torch."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def train(
    directory: Path, first: int, last: int, *, size: int = 1000, dies: bool = False, when: Path | None = None
) -> None:
    """Save all the time, keep two, and be killed in the middle of the last save if it `dies`."""
    eventually(lambda: when is None or when.exists(), seconds=600)
    store = CheckpointStore(directory)
    store.sweep()
    for step in range(first, last + 1):
        kill = partial(os.kill, os.getpid(), signal.SIGKILL if dies and step == last else 0)
        save(directory, step, module=stamp(Stamped(size), step), before_commit=kill)
        store.prune([unbroken.KeepLast(2)], is_intact=lambda _: True)


def put_flipped(directory: Path, elsewhere: Path, step: int, *, size: int = 1000) -> str:
    """Put a checkpoint of `step` in which one bit is flipped into its place, all at once."""
    elsewhere.mkdir()
    (elsewhere / "run.json").write_bytes((directory / "run.json").read_bytes())
    name = save(elsewhere, step, module=stamp(Stamped(size), step)).name
    flip(next((elsewhere / "checkpoints" / name).glob("*.safetensors")))
    os.rename(elsewhere / "checkpoints" / name, directory / "checkpoints" / name)
    return name


def test_no_request_sees_mixed_weights_fails_or_goes_back_whatever_becomes_of_the_trainer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    save(run, 1)
    killed = trainer(partial(train, run, 2, 10, dies=True))
    resumed = trainer(partial(train, run, 12, 18, when=go))
    with (
        killed as killed_id,
        resumed,
        unbroken.watch(run, Stamped(), every_seconds=0.001) as live,
        Requests(partial(live, 0.00015)) as requests,
    ):
        ended = os.waitid(os.P_PID, killed_id, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert ended.si_status == signal.SIGKILL
        eventually(lambda: live.checkpoint.step == 9)
        bad = put_flipped(run, tmp_path / "elsewhere", 11)
        eventually(lambda: live.problem is not None)
        go.touch()
        eventually(lambda: live.checkpoint.step == 18)
    steps = requests.check()
    assert len(steps) > 5
    assert not {10, 11} & set(steps)
    assert f"{bad} is passed over" in capfd.readouterr().err
    assert live.problem is None


@pytest.mark.chaos
def test_through_many_kills_damage_and_pruning_every_request_is_answered_by_one_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    rounds, size = 12, 30_000
    save(run, 1, module=stamp(Stamped(size), 1))
    with contextlib.ExitStack() as stack:
        gates = [tmp_path / f"go-{number}" for number in range(rounds)]
        killed = [
            stack.enter_context(
                trainer(
                    partial(train, run, 100 * number + 2, 100 * number + 60, size=size, dies=True, when=gate)
                )
            )
            for number, gate in enumerate(gates)
        ]
        live = stack.enter_context(unbroken.watch(run, Stamped(size), every_seconds=0.001))
        requests = stack.enter_context(Requests(partial(live, 0.0005), threads=6))
        for number, gate in enumerate(gates):
            gate.touch()
            os.waitid(os.P_PID, killed[number], os.WEXITED | os.WNOWAIT)
            eventually(lambda number=number: live.checkpoint.step == 100 * number + 59)
            put_flipped(run, tmp_path / f"elsewhere-{number}", 100 * number + 61, size=size)
    steps = requests.check()
    assert len(steps) > 2 * rounds
    assert capfd.readouterr().err.count("are not those that were saved") >= rounds - 1
    assert not {step for step in steps if step % 100 in (60, 61)}
