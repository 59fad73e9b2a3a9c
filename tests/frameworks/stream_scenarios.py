"""Streams of every kind behind a DataLoader, for twin runs that are killed at named moments.

Each takes shards by worker, of uneven length, shuffles in a buffer and draws from every generator. What a run
did is a log with one line a step, bits and all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.frameworks.loader_scenarios import Checkpoint, Log, in_own_process, noise, seed_all, stop_workers
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.iterable_loader import ResumableIterableLoader

ITEMS, BATCH, BUFFER, EPOCHS = 47, 4, 5, 3
KINDS = ("plain", "with a state", "with an iterator's state", "endless")
Sample = tuple[torch.Tensor, int]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    kind: str = "plain"
    workers: int = 0
    persistent: bool = False
    leave_after: int | None = None
    start_method: str | None = None
    draws_in_collate: bool = False
    drop_last: bool = False
    batch_size: int | None = BATCH

    def __str__(self) -> str:
        return f"{self.kind}, {self.workers} workers{' that live on' if self.persistent else ''}"


def shard() -> range:
    """The indices of this worker: the last one has far more than the others."""
    info = get_worker_info()
    me, of = (info.id, info.num_workers) if info else (0, 1)
    return range(me, ITEMS if me == of - 1 else ITEMS // (of + 1), of)


class Plain(IterableDataset[Sample]):
    """Without a state. In the main process its buffer is drawn from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Sample]:
        buffer: list[int] = []
        for index in shard():
            buffer.append(index)
            if len(buffer) > BUFFER:
                yield self.sample(buffer.pop(self.rng.integers(len(buffer))))
        self.rng.shuffle(buffer)
        yield from map(self.sample, buffer)

    def sample(self, index: int) -> Sample:
        # In the main process training draws from the shared generators in between.
        shared = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.tensor([index, self.rng.random(), shared], dtype=torch.float64), index


class WithState(Plain):
    """Goes on where its state says; the buffer is in it. From its end it begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self.epoch = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[Sample]:
        indices = shard()
        while self.done < len(indices):
            self.buffer.append((indices[self.done] + self.epoch) % ITEMS)
            self.done += 1
            if len(self.buffer) > BUFFER:
                yield self.sample(self.buffer.pop(random.randrange(len(self.buffer))))
        while self.buffer:
            yield self.sample(self.buffer.pop(random.randrange(len(self.buffer))))
        self.done, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        # The live list: it has to be copied at once.
        return {"done": self.done, "epoch": self.epoch, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.epoch, self.buffer = state["done"], state["epoch"], list(state["buffer"])


class Steps:
    """An iterator with a state."""

    def __init__(self, owner: Plain) -> None:
        self.owner = owner
        self.indices = list(shard())
        self.mask = torch.ones(len(self.indices), dtype=torch.bool)

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        left = self.mask.nonzero().flatten()
        if not len(left):
            raise StopIteration
        place = int(left[torch.randint(len(left), ())])
        self.mask[place] = False
        return self.owner.sample(self.indices[place])

    def state_dict(self) -> dict[str, Any]:
        return {"mask": self.mask}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mask.copy_(state["mask"])


class WithIteratorState(Plain):
    def __iter__(self) -> Iterator[Sample]:
        return Steps(self)


class Endless(Plain):
    def __iter__(self) -> Iterator[Sample]:
        for start in itertools.count():
            for index in shard():
                yield self.sample((index + start + int(self.rng.integers(3))) % ITEMS)


_KINDS: dict[str, Callable[[], Plain]] = dict(
    zip(KINDS, (Plain, WithState, WithIteratorState, Endless), strict=True)
)


def draw_and_stack(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate function that draws too."""
    pairs = samples if isinstance(samples, list) else [samples]
    x = torch.stack([sample[0] for sample in pairs])
    return x + float(np.random.beta(0.4, 0.4)), torch.tensor([sample[1] for sample in pairs])


def build_loader(scenario: Scenario) -> DataLoader[Any]:
    return DataLoader(
        _KINDS[scenario.kind](),
        batch_size=scenario.batch_size,
        num_workers=scenario.workers,
        persistent_workers=scenario.persistent,
        drop_last=scenario.drop_last,
        multiprocessing_context=scenario.start_method,
        collate_fn=draw_and_stack if scenario.draws_in_collate else None,
    )


class _Dead(BaseException):
    """The last moment was reached: nothing of this process may run any more."""


class Trainer:
    """One process' lifetime in a run."""

    def __init__(self, scenario: Scenario, take: tuple[int, ...]) -> None:
        self.scenario = scenario
        self.take = take
        self.log: Log = []
        self.moment = 0
        self.taken: dict[int, Checkpoint] = {}
        self.loader = ResumableIterableLoader(build_loader(scenario))

    def train(self, resume: Checkpoint | None) -> None:
        if resume is not None:
            self.loader.restore(resume["loader"])
            restore_present_rng(resume["rng"])
            self.moment = resume["moment"]
        first = resume["epoch"] if resume else 0
        for epoch in range(first, EPOCHS):
            inside = resume is not None and resume["is_inside"] and epoch == first
            self._train_epoch(epoch, resume if inside else None)

    def _train_epoch(self, epoch: int, resume: Checkpoint | None) -> None:
        batches: Any
        if resume is None:
            batches = self.loader.iterate()
        else:
            noise()
            rng = resume["rng"]
            batches = self.loader.iterate(inside_epoch=True, after_replay=lambda: restore_present_rng(rng))
        for batch in batches:
            if self.loader.state()["batches"] == self.scenario.leave_after:
                break
            self.log.append(step(epoch, batch))
            self._reach(epoch, is_inside=True)
        batches.close()
        self._reach(epoch, is_inside=True)
        self.log.append(("validation", *noise()))
        self._reach(epoch + 1, is_inside=False)

    def _reach(self, epoch: int, *, is_inside: bool) -> None:
        self.moment += 1
        if self.moment not in self.take:
            return
        self.taken[self.moment] = {
            "loader": self.loader.state(),
            "rng": capture_global_rng(),
            "epoch": epoch,
            "is_inside": is_inside,
            "moment": self.moment,
            "log": list(self.log),
        }
        if len(self.taken) == len(self.take):
            raise _Dead


def step(epoch: int, batch: Any) -> tuple[str, ...]:
    x, indices = batch
    bits = hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
    return (str(epoch), str(torch.as_tensor(indices).tolist()), str(x.dtype), bits, *noise())


def plain_run(scenario: Scenario) -> Log:
    """The same training with the unwrapped loader and nothing of ours."""
    log: Log = []
    loader = build_loader(scenario)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader, 1):
            if number == scenario.leave_after:
                break
            log.append(step(epoch, batch))
        log.append(("validation", *noise()))
    return log


@functools.cache
def plain_log(scenario: Scenario) -> Log:
    def job() -> Log:
        seed_all(0)
        log = plain_run(scenario)
        stop_workers()
        return log

    return in_own_process(job)  # type: ignore[no-any-return]


def killed_run(
    scenario: Scenario, take: tuple[int, ...], resume: Checkpoint | None = None
) -> dict[int, Checkpoint]:
    """Train until the last of the moments `take`, die there, and return the checkpoints taken at each."""
    return in_own_process(lambda: _attempt(scenario, take, resume).taken)  # type: ignore[no-any-return]


def finished_run(scenario: Scenario, resume: Checkpoint | None) -> Log:
    """Train to the end and return the log, that of the attempts before included."""
    return in_own_process(  # type: ignore[no-any-return]
        lambda: (resume["log"] if resume else []) + _attempt(scenario, (), resume).log
    )


# The trainer stays referenced, so that its workers and open pass are alive when the process is killed.
_alive: list[Trainer] = []


def _attempt(scenario: Scenario, take: tuple[int, ...], resume: Checkpoint | None) -> Trainer:
    # What the script seeds at its start must not matter to a resumed run.
    seed_all(0 if resume is None else 1)
    trainer = Trainer(scenario, take)
    _alive.append(trainer)
    with contextlib.suppress(_Dead):
        trainer.train(resume)
    if resume is not None:
        for checkpoint in trainer.taken.values():
            checkpoint["log"] = resume["log"] + checkpoint["log"]
    return trainer


def cut_and_resumed(scenario: Scenario) -> list[str]:
    """Read one epoch, cut after three batches and gone on with by another loader; return the batches."""
    seed_all(0)
    first, second = (ResumableIterableLoader(build_loader(scenario)) for _ in range(2))
    batches: Any = first.iterate()
    seen = [str(next(batches)) for _ in range(3)]
    second.restore(first.state())
    batches.close()
    return seen + [str(batch) for batch in second.iterate(inside_epoch=True)]
