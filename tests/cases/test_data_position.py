"""Data position: over any number of stops each sample comes once an epoch, in the order of the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import unbroken

from .scenes import ask_to_stop

Ledger = list[tuple[int, tuple[int, ...]]]
SAMPLES, BATCH = 20, 4


class Indices(Dataset[int]):
    """Tells what is read of it."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


class Buffered(IterableDataset[int]):
    """A stream of 100 rows that shuffles in a buffer of 16; with a state, the buffer is in it."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for index in range(100):
            buffer.append(index)
            if len(buffer) > 16:
                yield buffer.pop(self.rng.randrange(len(buffer)))
        while buffer:
            yield buffer.pop(self.rng.randrange(len(buffer)))


class BufferedWithState(Buffered):
    def __init__(self) -> None:
        super().__init__()
        self.next = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.next < 100:
            self.buffer.append(self.next)
            self.next += 1
            if len(self.buffer) > 16:
                yield self.buffer.pop(self.rng.randrange(len(self.buffer)))
        while self.buffer:
            yield self.buffer.pop(self.rng.randrange(len(self.buffer)))
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.buffer = state["next"], list(state["buffer"])


def shuffled(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Indices(), BATCH, shuffle=True, num_workers=workers)


def consumed(
    directory: Path, loader: DataLoader[Any], *, epochs: int = 3, stop_at: int = -1, accumulate: int = 1
) -> Ledger:
    """Train, and be asked to stop in the step of this number; return the samples of each batch."""
    ledger: Ledger = []
    try:
        with unbroken.Run(directory, background=False) as run:
            for epoch in run.epochs(epochs):
                for number, batch in enumerate(run.batches(loader), 1):
                    ledger.append((epoch, tuple(batch.tolist())))
                    if number % accumulate:
                        continue
                    if run.step_count + 1 == stop_at:
                        ask_to_stop()
                    run.step()
    except SystemExit:
        pass
    return ledger


def ledgers(
    directory: Path, build: Callable[[], DataLoader[Any]], stops: tuple[int, ...], **options: Any
) -> tuple[Ledger, list[Ledger]]:
    """Return the ledger of a run that is left alone, and those of the attempts of one that is stopped."""
    torch.manual_seed(0)
    reference = consumed(directory / "whole", build(), **options)
    attempts = []
    for attempt, stop_at in enumerate((*stops, -1)):
        torch.manual_seed(attempt)
        attempts.append(consumed(directory / "stopped", build(), stop_at=stop_at, **options))
    return reference, attempts


def joined(attempts: list[Ledger]) -> Ledger:
    return [line for ledger in attempts for line in ledger]


@pytest.mark.parametrize("workers", [0, 1])
def test_stopped_in_two_epochs_no_sample_comes_twice_and_none_is_left_out(
    tmp_path: Path, workers: int
) -> None:
    reference, attempts = ledgers(tmp_path, lambda: shuffled(workers), (2, 12))

    assert joined(attempts) == reference
    for epoch in range(3):
        seen = [index for number, batch in reference if number == epoch for index in batch]
        assert sorted(seen) == list(range(SAMPLES))


def test_what_was_consumed_is_skipped_in_the_resumed_epoch_and_in_no_later_one(tmp_path: Path) -> None:
    reference, attempts = ledgers(tmp_path, shuffled, (3,))
    last = attempts[-1]

    assert joined(attempts) == reference
    assert [sum(epoch == number for epoch, _ in last) for number in range(3)] == [2, 5, 5]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stop_at", [4, 5, 6], ids=["before the end", "at the end", "after the first"])
def test_the_end_of_an_epoch_and_the_begin_of_the_next_are_one_position(
    tmp_path: Path, workers: int, stop_at: int
) -> None:
    reference, attempts = ledgers(tmp_path, lambda: shuffled(workers), (stop_at,), epochs=2)

    assert joined(attempts) == reference


@pytest.mark.parametrize("build", [Buffered, BufferedWithState])
def test_a_shuffle_buffer_loses_no_sample_and_repeats_none(
    tmp_path: Path, build: Callable[[], Buffered]
) -> None:
    reference, attempts = ledgers(tmp_path, lambda: DataLoader(build(), BATCH), (5, 9), epochs=1)

    assert joined(attempts) == reference
    assert sorted(index for _, batch in joined(attempts) for index in batch) == list(range(100))


def test_the_position_counts_samples_whatever_a_step_is(tmp_path: Path) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Indices(), 2, shuffle=True)

    reference, attempts = ledgers(tmp_path, build, (2, 3, 4), accumulate=2)

    assert joined(attempts) == reference


def test_consumed_samples_are_not_read_to_get_past_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    consumed(tmp_path / "run", shuffled(), stop_at=4)
    data = Indices()
    torch.manual_seed(1)
    rest = consumed(tmp_path / "run", DataLoader(data, BATCH, shuffle=True), epochs=1)

    assert data.reads == list(rest[0][1])
    assert len(rest) == 1
