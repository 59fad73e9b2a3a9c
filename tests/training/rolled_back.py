"""Runs that meet bad data and go back, and reference runs whose data never had it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.training.preemption import StopRequested

torch.set_num_threads(1)
SAMPLES, SIZE = 32, 4
BATCHES = SAMPLES // SIZE


class Data(Dataset[Any]):
    """Samples with noise from the generators of the process if `noisy`; those in `bad` are NaN."""

    def __init__(self, bad: Iterable[int] = (), *, noisy: bool = True) -> None:
        self.bad, self.noisy = frozenset(bad), noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = torch.randn(4) + float(np.random.rand()) + random.random() if self.noisy else torch.zeros(4)
        values = 0.1 * noise + torch.tensor([index / SAMPLES, 0.3, -0.2, 0.1])
        return values * (math.nan if index in self.bad else 1.0), torch.tensor(index % 3), index


class Stream(IterableDataset[Any]):
    """The samples of `data` in their order, without those in `left_out`."""

    def __init__(self, data: Data, left_out: Iterable[int] = ()) -> None:
        self.data, self.left_out = data, frozenset(left_out)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.data[index] for index in range(first, SAMPLES, step) if index not in self.left_out)


class Batches:
    """An iterable of batches that begins anew each time."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.stream, SIZE, generator=torch.Generator()))


class LeavesOut(BatchSampler):
    """Batches of a sampler without some, by their numbers in each epoch."""

    def __init__(self, sampler: Any, left_out: dict[int, set[int]]) -> None:
        super().__init__(sampler, SIZE, drop_last=False)
        self.left_out, self.begun = left_out, 0

    def __iter__(self) -> Iterator[list[int]]:
        # With the first batch: with workers a pass is begun twice.
        without, self.begun = self.left_out.get(self.begun, set()), self.begun + 1
        for number, batch in enumerate(super().__iter__()):
            if number not in without:
                yield batch


def loader_of(kind: str, data: Data, left_out: dict[int, set[int]] | None = None) -> Any:
    """Return what gives the batches of `data`; a stream leaves batches out in each epoch."""
    name, _, workers = kind.partition("-")
    data.noisy = data.noisy and (name == "keyed" or not workers)
    options = {"num_workers": int(workers[:1] or 0), "persistent_workers": workers.endswith("p")}
    if name in ("stream", "iterable"):
        batches = {number for numbers in (left_out or {}).values() for number in numbers}
        stream = Stream(data, {number * SIZE + at for number in batches for at in range(SIZE)})
        return Batches(stream) if name == "iterable" else DataLoader(stream, SIZE, **options)
    if left_out is None or name == "keyed":
        return DataLoader(data, SIZE, shuffle=name != "ordered", **options)
    sampler = SequentialSampler(data) if name == "ordered" else RandomSampler(data)
    return DataLoader(data, batch_sampler=LeavesOut(sampler, left_out), **options)


def seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def train(
    directory: Path,
    kind: str = "shuffled",
    *,
    bad: Iterable[int] = (),
    spikes: Iterable[int] = (),
    left_out: dict[int, set[int]] | None = None,
    epochs: int = 2,
    per_step: int = 1,
    save_every: int = 3,
    health: Any = None,
    trouble: Any = None,
    **options: Any,
) -> Any:
    """Train, and return the samples of each batch.

    Batches with `spikes` get a high loss from epoch 5 on; `trouble(model, step, loss)` may change things.
    """
    seed()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader, seen = loader_of(kind, Data(bad), left_out), list[list[int]]()
    randomness: Any = "keyed" if kind.startswith("keyed") else "capture"
    options = {"save": [unbroken.EverySteps(save_every)], "keep": [], **options}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with unbroken.Run(directory, health=health or unbroken.Health(), **options, **parts) as run:
        for epoch in run.epochs(epochs):
            for number, (inputs, labels, samples) in enumerate(run.batches(loader, randomness=randomness)):
                if randomness == "keyed" and number in (left_out or {}).get(epoch, ()):
                    continue
                seen.append(samples.tolist())
                loss = nn.functional.cross_entropy(model(inputs), labels) / per_step
                if epoch >= 5 and not {*seen[-1]}.isdisjoint(spikes):
                    loss = loss * 30
                loss.backward()
                if (number + 1) % per_step:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if trouble is not None:
                    loss = trouble(model, run.step_count + 1, loss)
                run.step(loss=loss, random=random.random())
    return seen


def train_on(directory: Path, *arguments: Any, **options: Any) -> int:
    """Train, and start again whenever the run stops to go back; return how often it did."""
    for times in range(10):
        try:
            train(directory, *arguments, **options)
        except StopRequested:
            continue
        return times
    raise AssertionError("the run goes back for ever")


def spoilt_once() -> Any:
    """Return a trouble: a weight is NaN after step 5, which is saved, and shows in step 6."""
    left = {5}

    def trouble(model: nn.Sequential, step: int, loss: torch.Tensor) -> torch.Tensor:
        if step in left:
            left.remove(step)
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
        return loss

    return trouble


def events(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    return [
        event
        for attempt in layout.attempts(directory)
        for event in read_events(layout.attempt_directory(directory, attempt) / layout.events_file())
        if event["kind"] in kinds
    ]


def history(directory: Path) -> dict[int, Any]:
    """Return what each step reported, of those that were not undone later."""
    found: dict[int, Any] = {}
    for event in events(directory, "step", "began", "rolled-back"):
        if event["kind"] == "step":
            found[event["step"]] = (event["epoch"], event["metrics"])
        else:
            found = {step: metrics for step, metrics in found.items() if step <= event["step"]}
    return found


def final_parts(directory: Path) -> Any:
    """Return all that the newest checkpoint holds, but for the position in the data."""
    checkpoint = CheckpointStore(directory).latest()
    tensors = checkpoint.load_tensors()
    parts = {path: bytes(tensor.data) for path, tensor in tensors.items() if not path.startswith("position/")}
    return checkpoint.step, checkpoint.manifest.parts, parts


def quarantined(directory: Path) -> dict[str, str]:
    """Return the reason for each checkpoint that was set aside."""
    found = (directory / layout.QUARANTINE).glob("*/reason.json")
    reasons = [json.loads(path.read_text()) for path in found]
    return {one["checkpoint"]: one["reason"] for one in reasons}
