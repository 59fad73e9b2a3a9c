"""Worker processes: whom they obey, when they end, and what is known of them after a failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.frameworks.loader_scenarios import (
    BATCH,
    BATCHES,
    Augmented,
    Scenario,
    build_loader,
    fresh_python,
    in_own_process,
    stop_workers,
)
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch.loader import ResumableLoader


class Heavy(Dataset[bytes]):
    """Samples that travel through the pipe and fill it, so that a worker waits until they are read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> bytes:
        return bytes(200_000)


def build_heavy() -> ResumableLoader:
    return ResumableLoader(DataLoader(Heavy(), 1, num_workers=2, prefetch_factor=4, collate_fn=list))


def workers_now() -> list[int]:
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_no_worker_survives_a_killed_trainer() -> None:
    def job() -> list[int]:
        batches = build_heavy().iterate()
        next(batches)
        next(batches)
        kept.append(batches)
        return workers_now()

    # A reference that lasts: workers of an iteration that is let go are stopped in peace.
    kept: list[Any] = []

    workers = in_own_process(job)

    try:
        assert len(workers) == 2
        assert wait_until(lambda: not any(is_running(pid) for pid in workers))
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


def test_workers_outlive_the_thread_that_started_them() -> None:
    def job() -> int:
        loader = ResumableLoader(build_loader(Scenario(workers=2)))
        opened: list[Iterator[Any]] = []

        def open_and_read() -> None:
            opened.append(loader.iterate())
            next(opened[0])
            next(opened[0])

        thread = threading.Thread(target=open_and_read)
        thread.start()
        thread.join()
        task = Path(f"/proc/self/task/{thread.native_id}")
        assert wait_until(lambda: not task.exists())
        count = 2 + len(list(opened[0]))
        stop_workers()
        return count

    assert in_own_process(job) == BATCHES


def test_workers_leave_ctrl_c_to_the_trainer() -> None:
    def job() -> int:
        loader = ResumableLoader(build_loader(Scenario(workers=2)))
        batches = loader.iterate()
        next(batches)
        next(batches)
        for pid in workers_now():
            os.kill(pid, signal.SIGINT)
        return 2 + len(list(batches))

    assert in_own_process(job) == BATCHES


class FailsAt(Augmented):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.index:
            raise OSError("no such file")
        return super().__getitem__(index)


def left_early(loader: ResumableLoader) -> None:
    for _ in loader.iterate():
        break


def test_after_a_batch_failed_in_a_worker_that_lives_on_no_state_is_made_up() -> None:
    def job() -> str:
        scenario = Scenario(kind="sequential", workers=2, persistent=True)
        loader = ResumableLoader(build_loader(scenario, FailsAt(3 * BATCH)))
        left_early(loader)  # with the batch that fails in flight
        with pytest.raises(OSError, match="no such file"):
            loader.state()
        with pytest.raises(UnsupportedStateError) as caught:
            loader.state()
        return caught.value.message

    assert "random states of all workers" in in_own_process(job)


def test_the_position_before_a_batch_that_failed_is_kept() -> None:
    def job() -> tuple[object, ...]:
        loader = ResumableLoader(build_loader(Scenario(kind="sequential", workers=2), FailsAt(3 * BATCH)))
        with pytest.raises(OSError, match="no such file"):
            list(loader.iterate())
        state = loader.state()
        return state["batches"], state["between_epochs"]

    assert in_own_process(job) == (3, False)


def test_a_script_that_ends_inside_an_epoch_ends_in_silence() -> None:
    done = fresh_python(
        "loader = ResumableLoader(build_loader(Scenario(workers=2, persistent=True)))\n"
        "batches = loader.iterate()\n"
        "next(batches)\n"
    )

    assert done.stderr == ""
