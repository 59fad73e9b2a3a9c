"""A deliberately nasty training run: it can be killed at named moments and resumed in another process.

Randomness comes from everywhere it can: three global generators in dataset, collate function and training
loop, and a generator that the dataset holds. What a run did is a log with one line a step, bits and all.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.loader import ResumableLoader

SAMPLES, WIDTH, BATCH, EPOCHS = 44, 4, 4, 3
BATCHES = SAMPLES // BATCH

KINDS = (
    "sequential",
    "shuffle",
    "shuffle with generator",
    "weighted",
    "replacement with generator",
    "batch sampler",
    "eager sampler",
    "distributed",
)
MOMENTS = ("0.1", "0.6", "0.11", "1.1", "1.5", "1.11", "1.exhausted", "1.after", "2.1", "2.11")

Checkpoint = dict[str, Any]
Log = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    kind: str = "shuffle"
    workers: int = 0
    persistent: bool = False
    leave_after: int | None = None
    start_method: str | None = None
    prefetch_factor: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}, {self.workers} workers{' that live on' if self.persistent else ''}"


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Random augmentation from four sources, one of them held by the dataset; keeps a ledger of its reads."""

    def __init__(self) -> None:
        self.x = torch.arange(SAMPLES * WIDTH, dtype=torch.float64).reshape(SAMPLES, WIDTH)
        self.rng = np.random.default_rng(99)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads.append(index)
        info = get_worker_info()
        x = self.x[index] + torch.rand(WIDTH, dtype=torch.float64) + float(np.random.rand())
        x += info.seed % 1000 if info else 0
        return (x.flip(0) if random.random() < 0.3 else x) * float(self.rng.normal()), index


def mix(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate function that draws too."""
    x = torch.stack([sample[0] for sample in samples])
    return x + float(np.random.beta(0.4, 0.4)) * x.flip(0), torch.tensor([sample[1] for sample in samples])


def seed_from_worker(worker: int) -> None:
    """The usual worker_init_fn: a generator of each worker's own, seeded by torch's worker seed."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert isinstance(info.dataset, Augmented)
    info.dataset.rng = np.random.default_rng(info.seed)


class EagerSampler(Sampler[list[int]]):
    """Draws its order when `iter` is called, not at the first batch, as a generator function would."""

    def __init__(self, data: Dataset[Any]) -> None:
        super().__init__()

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[start : start + BATCH] for start in range(0, SAMPLES, BATCH)])


def build_loader(scenario: Scenario, dataset: Dataset[Any] | None = None) -> DataLoader[Any]:
    data: Any = dataset or Augmented()
    options: dict[str, Any] = {
        "num_workers": scenario.workers,
        "persistent_workers": scenario.persistent,
        "collate_fn": mix,
        "multiprocessing_context": scenario.start_method,
        "prefetch_factor": scenario.prefetch_factor,
    }
    seeded = torch.Generator().manual_seed(7)
    match scenario.kind:
        case "shuffle":
            return DataLoader(data, BATCH, shuffle=True, worker_init_fn=seed_from_worker, **options)
        case "shuffle with generator":
            return DataLoader(data, BATCH, shuffle=True, generator=seeded, **options)
        case "weighted":
            weights = torch.linspace(0.1, 1.0, SAMPLES).tolist()
            return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, SAMPLES), **options)
        case "replacement with generator":
            sampler = RandomSampler(data, replacement=True, generator=seeded)
            return DataLoader(data, BATCH, sampler=sampler, **options)
        case "batch sampler":
            subset = SubsetRandomSampler(range(SAMPLES - 1))
            return DataLoader(data, batch_sampler=BatchSampler(subset, BATCH, drop_last=False), **options)
        case "eager sampler":
            return DataLoader(data, batch_sampler=EagerSampler(data), **options)
        case "distributed":
            rank: Sampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
            return DataLoader(data, BATCH // 2, sampler=rank, **options)
    return DataLoader(data, BATCH, **options)


class _Dead(BaseException):
    """The last moment was reached: nothing of this process may run any more."""


class Trainer:
    """One process' lifetime in a run."""

    def __init__(self, scenario: Scenario, take: tuple[str, ...]) -> None:
        self.scenario = scenario
        self.take = take
        self.log: Log = []
        self.taken: dict[str, Checkpoint] = {}
        self.data = Augmented()
        self.loader = ResumableLoader(build_loader(scenario, self.data))

    def train(self, resume: Checkpoint | None) -> None:
        first, is_inside = 0, False
        if resume is not None:
            self.loader.restore(resume["loader"])
            restore_present_rng(resume["rng"])
            first, is_inside = resume["epoch"], resume["is_inside"]
        for epoch in range(first, EPOCHS):
            self._train_epoch(epoch, resume if is_inside and epoch == first else None)

    def _train_epoch(self, epoch: int, resume: Checkpoint | None) -> None:
        _set_epoch(self.loader._loader, epoch)
        batches: Any
        if resume is None:
            batches = self.loader.iterate()
        else:
            # What is drawn before the loop must not matter.
            noise()
            self.data.rng.normal()
            rng = resume["rng"]
            batches = self.loader.iterate(inside_epoch=True, after_replay=lambda: restore_present_rng(rng))
        for batch in batches:
            if self.loader.state()["batches"] == self.scenario.leave_after:
                break
            self.log.append(step(epoch, batch))
            self._reach(f"{epoch}.{self.loader.state()['batches']}", epoch, is_inside=True)
        batches.close()
        self._reach(f"{epoch}.exhausted", epoch, is_inside=True)
        self.log.append(("validation", *noise()))
        self._reach(f"{epoch}.after", epoch + 1, is_inside=False)

    def _reach(self, moment: str, epoch: int, *, is_inside: bool) -> None:
        if moment not in self.take:
            return
        rng = capture_global_rng()
        self.taken[moment] = {
            "loader": self.loader.state(),
            "rng": rng,
            "epoch": epoch,
            "is_inside": is_inside,
            "log": list(self.log),
        }
        if len(self.taken) == len(self.take):
            raise _Dead


def plain_run(scenario: Scenario) -> Log:
    """The same training with the unwrapped loader and nothing of ours."""
    log: Log = []
    loader = build_loader(scenario)
    for epoch in range(EPOCHS):
        _set_epoch(loader, epoch)
        for number, batch in enumerate(loader, 1):
            if number == scenario.leave_after:
                break
            log.append(step(epoch, batch))
        log.append(("validation", *noise()))
    return log


def step(epoch: int, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, ...]:
    x, indices = batch
    bits = hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
    return (str(epoch), str(indices.tolist()), str(x.dtype), bits, *noise())


def noise() -> tuple[str, ...]:
    """Draw from each global generator, as dropout and the like would."""
    return (random.random().hex(), float(np.random.rand()).hex(), float(torch.rand(())).hex())


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def in_own_process(job: Callable[..., Any], *arguments: Any) -> Any:
    """Run `job` in a forked process that then ends itself with SIGKILL; return its plain value."""
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory, "answer")
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                answer.write_text(repr(job(*arguments)))
            finally:
                if sys.exc_info()[1] is not None:
                    traceback.print_exc(file=sys.__stderr__)
                os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert answer.exists(), "the job failed; its traceback is on stderr"
        # Plain values only: this is also the proof that states hold nothing but them.
        return ast.literal_eval(answer.read_text())


@functools.cache
def plain_log(scenario: Scenario) -> Log:
    def job() -> Log:
        seed_all(0)
        log = plain_run(scenario)
        stop_workers()
        return log

    return in_own_process(job)  # type: ignore[no-any-return]


def stop_workers() -> None:
    """Unlike ours, workers of a plain loader may outlive a killed parent."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def killed_run(
    scenario: Scenario, take: tuple[str, ...], resume: Checkpoint | None = None
) -> dict[str, Checkpoint]:
    """Train until the last of the moments `take`, die there, and return the checkpoints taken at each."""

    def job() -> dict[str, Checkpoint]:
        return _attempt(scenario, take, resume).taken

    return in_own_process(job)  # type: ignore[no-any-return]


def finished_run(scenario: Scenario, resume: Checkpoint | None) -> Log:
    """Train to the end and return the log, that of the attempts before included."""

    def job() -> Log:
        return (resume["log"] if resume else []) + _attempt(scenario, (), resume).log

    return in_own_process(job)  # type: ignore[no-any-return]


# The trainer stays referenced, so that its workers and open iteration are alive when the process is killed.
_alive: list[Trainer] = []


def _attempt(scenario: Scenario, take: tuple[str, ...], resume: Checkpoint | None) -> Trainer:
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


def fresh_python(program: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program over the scenarios in an interpreter of its own; fails if it does."""
    header = "import ast, sys\nfrom tests.frameworks.loader_scenarios import *\ntorch.set_num_threads(1)\n"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", header + program],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "random"},
    )
    assert done.returncode == 0, done.stderr
    return done
