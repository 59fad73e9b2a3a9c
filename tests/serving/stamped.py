"""Weights that are all equal to the step they are of, so that a mixture of two sets shows in any request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbroken.checkpoint.manifest import PartEntry, Position, Validation
from unbroken.checkpoint.snapshot import Description, HostBuffers, capture
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.rundir.identity import open_run
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder


class Stamped(nn.Module):
    """Answers with the least and the greatest of all its numbers, tensor by tensor."""

    counter: torch.Tensor

    def __init__(self, size: int = 1000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, pause_seconds: float = 0) -> set[float]:
        found = set()
        for item in self.state_dict().values():
            found |= {float(item.min()), float(item.max())}
            time.sleep(pause_seconds)
        return found


def stamp(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for item in module.state_dict().values():
            item.fill_(value)
    return module


def save(
    directory: Path,
    step: int,
    *,
    before_commit: Callable[[], None] = lambda: None,
    module: nn.Module | None = None,
    parts: dict[str, nn.Module] | None = None,
    validation: Validation | None = None,
    metrics: dict[str, float] | None = None,
    **words: Any,
) -> Checkpoint:
    """Write the checkpoint of `step`, as a run does it, with every weight equal to it."""
    table = TensorTable()
    encoder = Encoder(table, [TorchCodec()], keep_aliases=True)
    live = parts or {"model": module or stamp(Stamped(), step)}
    description = Description(
        run_id=open_run(directory).run_id,
        step=step,
        attempt=1,
        created=datetime.now(UTC).isoformat(),
        position=Position(epoch=0, inside_epoch=True, loaders=[]),
        parts={
            name: PartEntry(
                handler="torch.module",
                type="tests.Module",
                state=encoder.encode(ModuleHandler().state(part), name),
            )
            for name, part in live.items()
        },
        validation=validation,
        metrics={name: encoder.encode(value, name) for name, value in (metrics or {}).items()},
        **words,
    )
    snapshot = capture(description, table, HostBuffers())
    return CheckpointStore(directory).save(snapshot, before_commit=before_commit)


def eventually(is_so: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


class Requests:
    """Threads that ask all the time, each with the answers it got in their order."""

    def __init__(self, ask: Callable[[], set[float]], threads: int = 3) -> None:
        self.answers: list[list[set[float]]] = [[] for _ in range(threads)]
        self.errors: list[Exception] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=(ask, mine)) for mine in self.answers]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _go_on(self, ask: Callable[[], set[float]], mine: list[set[float]]) -> None:
        try:
            while not self._over.is_set():
                mine.append(ask())
        except Exception as error:  # noqa: BLE001 - whatever a request meets
            self.errors.append(error)

    def check(self) -> list[int]:
        """Check what every request is promised, and return the steps that were served."""
        assert not self.errors
        steps: set[int] = set()
        for mine in self.answers:
            assert all(len(answer) == 1 for answer in mine), "a request met two sets of weights"
            order = [int(next(iter(answer))) for answer in mine]
            assert order == sorted(order), "a thread went back to older weights"
            steps |= set(order)
        return sorted(steps)
