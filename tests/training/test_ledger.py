"""A ledger of what training consumed, kept through real SIGKILLs while workers read ahead.

The trained step writes it, synced before the step counts; the dataset writes down each read. Both are
compared with what the plain loader of torch gives without the library. All samplers with all kinds of
workers are among the long tests.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import unbroken
import unbroken.training.run  # by each attempt, were it not for this
from unbroken.training import families

KINDS = ("sequential", "random", "weighted", "subset", "batch sampler", "own generator")
SAMPLES, BATCH, EPOCHS = 22, 4, 3
BATCHES = 6
PREFETCH = 2

# The step of this number is killed with its batch in hand, once its line is in the ledger ("trained"), or
# once it is counted and not yet saved.
Kill: TypeAlias = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    workers: int = 0
    persistent: bool = False

    def __str__(self) -> str:
        workers = f"{self.workers} workers that live on" if self.persistent else f"{self.workers} workers"
        return f"{self.kind}, {workers}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a process left: the step it began at, the lines of its steps, the indices it read."""

    began_at: int
    lines: list[str]
    reads: list[int]


class Recorded(Dataset[int]):
    """Its samples are their indices; each read is written down by the process that reads."""

    unbroken_fingerprint = "22 indices"

    def __init__(self, reads: Path) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        append(self.reads, str(index), is_synced=False)
        return index


def append(path: Path, line: str, *, is_synced: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # A single write: lines of several processes do not mix, and none is torn by a kill.
    os.write(descriptor, f"{line}\n".encode())
    if is_synced:
        os.fsync(descriptor)
    os.close(descriptor)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def build(case: Case, reads: Path) -> DataLoader[int]:
    data = Recorded(reads)
    weights = [1.0 + index % 3 for index in range(SAMPLES)]
    order: dict[str, dict[str, Any]] = {
        "sequential": {"batch_size": BATCH},
        "random": {"batch_size": BATCH, "shuffle": True},
        "weighted": {"batch_size": BATCH, "sampler": WeightedRandomSampler(weights, SAMPLES)},
        "subset": {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(1, SAMPLES))},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(data), BATCH, drop_last=False)},
        "own generator": {
            "batch_size": BATCH,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(5),
        },
    }
    if case.workers:
        order[case.kind] |= {"prefetch_factor": PREFETCH, "persistent_workers": case.persistent}
    return DataLoader(data, num_workers=case.workers, **order[case.kind])


def line_of(step: int, epoch: int, batch: torch.Tensor) -> str:
    """Train on the batch, which draws as dropout does, and return the line for the ledger."""
    return f"{step} {epoch} {' '.join(map(str, batch.tolist()))} {float(torch.rand(())).hex()}"


def indices_of(lines: Sequence[str]) -> list[int]:
    return [int(word) for line in lines for word in line.split()[2:-1]]


def train_plainly(case: Case, directory: Path) -> None:
    torch.manual_seed(0)
    loader, steps = build(case, directory / "reads"), count(1)
    for epoch in range(EPOCHS):
        for batch in loader:
            append(directory / "ledger", line_of(next(steps), epoch, batch))


def train(case: Case, directory: Path, number: int, kill: Kill | None) -> None:
    """Be the attempt of this number, up to its kill."""
    # Begun anew only if it was killed before its first checkpoint, and then with the same seed.
    torch.manual_seed(number if any(directory.glob("run/checkpoints/step-*")) else 0)
    reads, ledger = directory / f"reads{number}", directory / f"ledger{number}"
    loader = build(case, reads)
    with unbroken.Run(directory / "run", save=[unbroken.EverySteps(1)]) as run:
        append(ledger, str(run.step_count))
        for epoch in run.epochs(EPOCHS):
            for batch in run.batches(loader):
                step = run.step_count + 1

                def reach(moment: str, step: int = step) -> None:
                    if kill == (step, moment):
                        run._saver.wait()
                        die(case, reads, ledger, step)

                reach("in hand")
                append(ledger, line_of(step, epoch, batch))
                reach("trained")
                run.step()
                reach("counted")


def die(case: Case, reads: Path, ledger: Path, step: int) -> None:
    """End this process, once its workers have read ahead of `step` if the epoch has more for them."""
    began_at = int(lines_of(ledger)[0])
    consumed = BATCH * (step - began_at)
    deadline = time.monotonic() + 30
    while case.workers and step % BATCHES not in (0, BATCHES - 1) and len(lines_of(reads)) <= consumed:
        assert time.monotonic() < deadline, "the workers read nothing ahead"
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def start(job: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(job, *arguments))
    process.start()
    return process


def _alone(job: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    job(*arguments)


@functools.cache
def plain_ledger(case: Case) -> list[str]:
    """Return the ledger of the plain loader that nothing disturbs."""
    with tempfile.TemporaryDirectory() as directory:
        process = start(train_plainly, case, Path(directory))
        process.join()
        assert process.exitcode == 0
        return lines_of(Path(directory, "ledger"))


def attempt_of(directory: Path, number: int) -> Attempt | None:
    """Return what the attempt left, or None if it died before it had begun."""
    lines = lines_of(directory / f"ledger{number}")
    if not lines:
        return None
    reads = list(map(int, lines_of(directory / f"reads{number}")))
    return Attempt(began_at=int(lines[0]), lines=lines[1:], reads=reads)


def killed_as_planned(case: Case, directory: Path, plan: Sequence[Kill]) -> Iterator[Attempt]:
    for number, kill in enumerate([*plan, None], 1):
        process = start(train, case, directory, number, kill)
        process.join()
        assert process.exitcode == (-signal.SIGKILL if kill else 0), f"attempt {number}"
        attempt = attempt_of(directory, number)
        assert attempt is not None
        yield attempt


def check(case: Case, attempts: Sequence[Attempt]) -> None:
    """Each index was consumed once, in the order of the reference, and none that was consumed read again."""
    whole = plain_ledger(case)
    assert len(whole) == EPOCHS * BATCHES
    ahead = case.workers * PREFETCH
    for attempt in attempts:
        begin, end = attempt.began_at, attempt.began_at + len(attempt.lines)
        assert attempt.lines == whole[begin:end]
        # All that it consumed, the batch in its hand, and what its workers read ahead of that.
        read = Counter(attempt.reads)
        assert (
            Counter(indices_of(attempt.lines)) <= read <= Counter(indices_of(whole[begin : end + 1 + ahead]))
        )
    last = attempts[-1]
    assert Counter(last.reads) == Counter(indices_of(last.lines))
    kept = [
        line
        for attempt, following in pairwise(attempts)
        for line in attempt.lines[: following.began_at - attempt.began_at]
    ]
    assert kept + last.lines == whole


def check_each_index_once_an_epoch(case: Case) -> None:
    """So it is in the ledger of the reference, which has to be right itself."""
    expected = range(1, SAMPLES) if case.kind == "subset" else range(SAMPLES)
    for epoch in range(EPOCHS):
        indices = indices_of(plain_ledger(case)[epoch * BATCHES : (epoch + 1) * BATCHES])
        assert len(indices) == len(expected)
        assert case.kind == "weighted" or sorted(indices) == list(expected)


# Twice in the first epoch, and at the borders of the second.
SHARPEST: tuple[Kill, ...] = ((2, "in hand"), (4, "trained"), (7, "in hand"), (12, "counted"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forked")
@pytest.mark.parametrize(
    "case",
    [
        Case(kind="weighted"),
        Case(kind="random", workers=2),
        Case(kind="own generator", workers=2, persistent=True),
    ],
    ids=str,
)
def test_each_index_is_trained_once_in_order_over_kills_while_workers_read_ahead(
    tmp_path: Path, case: Case
) -> None:
    attempts = list(killed_as_planned(case, tmp_path, SHARPEST))

    check(case, attempts)
    check_each_index_once_an_epoch(case)
    # One killed with its batch in hand has trained nothing that is trained again.
    assert [attempt.began_at for attempt in attempts] == [0, 1, 3, 6, 11]
    if case.workers:
        assert len(attempts[0].reads) > 2 * BATCH


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forked")
def test_samples_that_are_read_again_to_get_past_them_show_in_the_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As any iterable that is nothing but that; the attempts are forked from here.
    monkeypatch.setattr(families, "resumable_loader", lambda loader: None)
    case = Case(kind="random")
    attempts = list(killed_as_planned(case, tmp_path, [(4, "in hand")]))

    assert attempts[1].lines == plain_ledger(case)[3:]
    with pytest.raises(AssertionError):
        check(case, attempts)
