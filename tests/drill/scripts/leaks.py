"""A small training that resumes exactly, but for the leak that its first argument names."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import unbroken

LEAK = sys.argv[1] if len(sys.argv) > 1 else "none"
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
SAMPLES, BATCH = 24, 4
points = torch.randn(SAMPLES, 4)
labels = (points.sum(1) > 0).long()


def jitter() -> Callable[[Tensor], Tensor]:
    """An augmentation whose generator only this function knows."""
    generator = torch.Generator().manual_seed(5)

    def add(points: Tensor) -> Tensor:
        return points + 0.1 * torch.rand(4, generator=generator)

    return add


class Points(Dataset[Any]):
    def __init__(self, change: Callable[[Tensor], Tensor] | None) -> None:
        self.change = change

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        point = points[index]
        return (point if self.change is None else self.change(point)), labels[index]


class Shuffled(Sampler[int]):
    """Shuffles by a number of the epoch that is kept where nobody looks."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        global shuffles  # noqa: PLW0603
        shuffles += 1
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(shuffles)).tolist())


class Centred(nn.Module):
    """Subtracts a running mean that no state_dict has."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(inputs.mean(0), 0.1)
        return inputs - self.mean


class Average:
    """A moving average of the weights, which are trained towards it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [value.detach().clone() for value in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        kept = torch.bfloat16 if LEAK == "rounded" else torch.float32
        return {str(index): value.to(kept) for index, value in enumerate(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, value in enumerate(self.values):
            value.copy_(state[str(index)])

    def update(self, model: nn.Module, decay: float) -> None:
        for value, parameter in zip(self.values, model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 1 - decay)

    def pull(self, model: nn.Module) -> None:
        with torch.no_grad():
            for value, parameter in zip(self.values, model.parameters(), strict=True):
                parameter.lerp_(value, 0.1)


class Warmup:
    """A schedule of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def rate(self) -> float:
        self.count += 1
        return 0.002 * self.count


def seed_worker(worker: int) -> None:
    # The number of the attempt instead of the seed that torch hands out.
    torch.manual_seed(len(list((run.directory / "attempts").iterdir())))


def noisy(point: Tensor) -> Tensor:
    return point + 0.1 * torch.rand(4)


centre = Centred() if LEAK == "buffer" else nn.BatchNorm1d(8)
model = nn.Sequential(nn.Linear(4, 8), centre, nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
average = Average(model)
warmup = Warmup()
noise = np.random.default_rng(3)
shake = jitter()
updates = seen = shuffles = 0
weights = {"one": 1.0, "two": 2.0, "three": 3.0}
loader = DataLoader(
    Points(noisy if LEAK == "worker-seed" else None),
    batch_size=BATCH,
    shuffle=LEAK != "sampler-epoch",
    sampler=Shuffled() if LEAK == "sampler-epoch" else None,
    num_workers=1 if LEAK == "worker-seed" else 0,
    worker_init_fn=seed_worker if LEAK == "worker-seed" else None,
)
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
if LEAK == "scheduler":
    del parts["scheduler"]


def at_the_start() -> None:
    """What a script does with its first batch, once in each process."""
    if LEAK == "python-seed":
        random.seed(7)
    if LEAK == "rate" and run.restored:
        optimizer.param_groups[0]["lr"] = 0.005
    if LEAK == "stepped" and run.restored:
        scheduler.step()
    if LEAK == "moments" and run.restored:
        optimizer.state.clear()


def changed(inputs: Tensor) -> Tensor:
    """What each step does to its batch, and may draw, count and remember."""
    global seen  # noqa: PLW0603
    if LEAK == "python-seed":
        return inputs + 0.1 * random.random()
    if LEAK == "numpy":
        return inputs + 0.1 * noise.random()
    if LEAK == "closure":
        return shake(inputs)
    if LEAK == "counter":
        seen += 1
        return inputs * (1.0 if seen % 5 else 1.5)
    if LEAK == "set-order":
        order = [ord(letter) for letter in set("abcdefgh")]
        return inputs * (1 + sum(number * place for place, number in enumerate(order)) / 1e4)
    if LEAK == "dict-order":
        first = next(iter(weights))
        weights[first] = weights.pop(first)
        return inputs * weights[first]
    return inputs


with unbroken.Run("runs/leaks", **parts) as run:
    for _epoch in run.epochs(20):
        skip = run.step_count % (SAMPLES // BATCH) if LEAK == "skip" and run.restored else 0
        batches = iter(loader) if LEAK == "plain-loop" else run.batches(loader)
        for number, (inputs, targets) in enumerate(batches):
            if number < skip:
                continue
            if number == skip:
                at_the_start()
            if LEAK == "warmup":
                optimizer.param_groups[0]["lr"] = warmup.rate()
            loss = nn.functional.cross_entropy(model(changed(inputs)), targets)
            loss.backward()
            if LEAK == "window":
                # The window of accumulation grows with what was seen.
                seen += 1
                if seen % (1 + seen // 7):
                    continue
            optimizer.step()
            optimizer.zero_grad()
            if LEAK == "ema":
                updates += 1
            average.update(model, 1 - 1 / (2 + updates))
            average.pull(model)
            run.step(loss=loss)
        scheduler.step()
