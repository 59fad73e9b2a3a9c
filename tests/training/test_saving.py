"""What is saved when, what is kept, and a save that fails."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import SaveFailedError, StaleWriterError, UsageError
from unbroken.handover.client import WriterHere, WriterProcess
from unbroken.rundir import control
from unbroken.rundir.identity import new_attempt
from unbroken.rundir.processes import read_stat
from unbroken.state.tensors import HostTensor

from .runs import names, steps, words_of


class TestSaving:
    def test_best_is_decided_by_record_and_kept(self, tmp_path: Path) -> None:
        keep = [unbroken.KeepLast(1), unbroken.KeepBest(1, "accuracy")]
        with unbroken.Run(tmp_path, save=[], keep=keep) as run:
            for epoch in run.epochs(4):
                steps(run, 2)
                run.record(accuracy=[0.2, 0.9, 0.5, 0.4][epoch])
        assert names(tmp_path) == ["step-00000004", "step-00000008"]
        metrics = CheckpointStore(tmp_path).get("step-00000004").manifest.metrics
        assert metrics == {"accuracy": 0.9, "loss": 0.25}

    def test_a_metric_of_an_older_state_is_not_kept_with_a_newer_one(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 1)
            run.record(accuracy=0.9)
            steps(run, 1)
        assert CheckpointStore(tmp_path).latest().manifest.metrics == {"loss": 0.5}

    def test_a_requested_checkpoint_is_written_at_the_next_step(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 1)
            control.request_save(tmp_path)
            steps(run, 2)
        assert names(tmp_path) == ["step-00000002", "step-00000003"]

    def test_the_snapshot_is_of_the_moment_of_the_save(self, tmp_path: Path) -> None:
        weight = torch.zeros(1000)
        history: list[int] = []
        with unbroken.Run(tmp_path, weight=weight, history=history) as run:
            run.step()
            run.save()
            weight.fill_(7)
            history.append(1)
        state = CheckpointStore(tmp_path).get("step-00000001").load()
        assert bytes(state["weight"].data) == bytes(4000)
        assert state["history"] == []

    def test_a_failed_save_is_raised_at_the_next_step_and_left_in_the_last_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            pytest.raises(SaveFailedError, match="No space left"),
            unbroken.Run(tmp_path, full_disk="fail") as run,
        ):
            steps(run, 1)
            monkeypatch.setattr(os, "fsync", no_space_for_the_saver)
            run.save()
            while run._saver.is_writing:
                pass
            run.step()
        monkeypatch.undo()
        assert (words_of(tmp_path).ending, words_of(tmp_path).kind) == ("failed", "save-failed")
        assert CheckpointStore(tmp_path).storage.list("checkpoints") == []

    def test_a_failure_whose_last_words_cannot_be_written_is_still_the_one_raised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ZeroDivisionError) as caught, unbroken.Run(tmp_path):
            monkeypatch.setattr(os, "fsync", no_space)
            raise ZeroDivisionError
        assert "its last words could not be written" in caught.value.__notes__[0]

    def test_without_background_a_save_is_done_when_it_returns(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(2)], background=False) as run:
            steps(run, 2)
            assert (run._saver.is_writing, names(tmp_path)) == (False, ["step-00000002"])
            run.step()
            run.save()
            assert names(tmp_path) == ["step-00000002", "step-00000003"]

    @pytest.mark.parametrize(("size", "writer"), [(1 << 10, WriterHere), (1 << 20, WriterProcess)])
    def test_only_a_large_state_is_written_by_another_process_and_none_is_left(
        self, tmp_path: Path, size: int, writer: type
    ) -> None:
        before = children()
        with unbroken.Run(tmp_path, weight=torch.ones(size // 4)) as run:
            run.step()
            run.save()
            assert type(run._saver._writer) is writer
            assert len(children() - before) == (writer is WriterProcess)
        assert children() == before
        assert CheckpointStore(tmp_path).latest().load()["weight"] == tensor_of_ones(size)

    def test_a_wait_that_is_interrupted_leaves_the_save_in_flight(self, tmp_path: Path) -> None:
        """Ctrl-C, caught by the script: the memory that is being written must not be filled anew."""
        weight = torch.zeros(1 << 18)
        with unbroken.Run(tmp_path, save=[], weight=weight) as run, interrupted_by(signal.SIGUSR1):
            steps(run, 1)
            writer = run._saver._writer
            assert isinstance(writer, WriterProcess)
            assert writer._child is not None
            with stopped(writer._child.process_id):
                run.save()
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                with pytest.raises(KeyboardInterrupt):
                    run._saver.wait()
            weight.fill_(1)
            steps(run, 1)
            run.save()
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert bytes(CheckpointStore(tmp_path).get("step-00000001").load()["weight"].data) == bytes(1 << 20)

    def test_a_writer_that_was_superseded_cannot_commit(self, tmp_path: Path) -> None:
        with pytest.raises(SaveFailedError, match="superseded") as caught, unbroken.Run(tmp_path) as run:
            steps(run, 1)
            new_attempt(tmp_path)
        assert isinstance(caught.value.__cause__, StaleWriterError)
        assert names(tmp_path) == []


def children() -> set[int]:
    stats = [read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()]
    return {stat.process_id for stat in stats if stat is not None and stat.parent_id == os.getpid()}


def tensor_of_ones(size: int) -> HostTensor:
    return HostTensor("F32", (size // 4,), memoryview(struct.pack("<f", 1) * (size // 4)))


@contextmanager
def interrupted_by(number: int) -> Iterator[None]:
    before = signal.signal(number, signal.default_int_handler)
    yield
    signal.signal(number, before)


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def no_space_for_the_saver(descriptor: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        no_space(descriptor)


class TestMemoryBudget:
    def test_a_state_whose_copy_does_not_fit_is_refused_with_both_numbers(self, tmp_path: Path) -> None:
        weight = torch.zeros(1 << 20)
        with (
            pytest.raises(UsageError, match=r"at most 1,000,000 bytes of memory, found 4,\d\d\d,\d\d\d"),
            unbroken.Run(tmp_path, memory_budget_bytes=1_000_000, weight=weight) as run,
        ):
            steps(run, 1)

    def test_snapshots_do_with_one_copy_where_two_do_not_fit(self, tmp_path: Path) -> None:
        weight = torch.zeros(1 << 20)
        with unbroken.Run(
            tmp_path,
            save=[unbroken.EverySteps(2)],
            snapshot=[unbroken.EverySteps(1)],
            memory_budget_bytes=6_000_000,
            weight=weight,
        ) as run:
            for step in range(5):
                weight.fill_(step + 1)
                steps(run, 1)
            assert len(run._saver._slots) == 1
        for name in names(tmp_path):
            checkpoint = CheckpointStore(tmp_path).get(name)
            assert bytes(checkpoint.load()["weight"].data[:4]) == struct.pack("<f", checkpoint.step)


def test_in_the_foreground_a_checkpoint_is_there_when_the_step_is_over(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], background=False) as run:
        for step in (1, 2, 3):
            steps(run, 1)
            assert CheckpointStore(tmp_path).latest().step == step
