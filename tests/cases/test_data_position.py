"""Data position: over any number of stops each sample comes once an epoch, in the order of the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import unbroken
from unbroken.frameworks.torch import index_stream

from . import broken
from .scenes import ask_to_stop, batch, fails, stopped

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


@pytest.mark.parametrize("build", [pytest.param(Buffered, marks=pytest.mark.chaos), BufferedWithState])
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


class TestAccumulationFactor:
    """Recent data comes again, or much is passed over (EleutherAI/gpt-neox#308, huggingface/diffusers#3467).

    Forty micro-batches make ten steps of four, and the rest steps of four or of two.
    """

    def attempt(self, directory: Path, factor: int, stop_at: int = -1) -> list[int]:
        """Train an epoch of 60 micro-batches; return the samples that were gathered for a step."""
        torch.manual_seed(factor)
        self.seen: list[int] = []
        order = torch.Generator().manual_seed(1)
        loader: DataLoader[Any] = DataLoader(range(120), 2, shuffle=True, generator=order)  # type: ignore[arg-type]
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = {"accumulate": factor}
        with unbroken.Run(
            directory, background=False, config=config, model=model, optimizer=optimizer
        ) as run:
            self.restored, self.begun_at = run.restored, run.step_count
            for _ in run.epochs(1):
                for indices in run.batches(loader):
                    (model(batch(int(indices[0]), 2, 4)).square().mean() / factor).backward()
                    self.seen += indices.tolist()
                    if len(self.seen) // 2 % factor:
                        continue
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.step_count + 1 == stop_at:
                        ask_to_stop()
                    run.step()
        self.steps = run.step_count
        return self.seen

    def play(self, directory: Path, factor: int) -> None:
        expected = self.attempt(directory / "whole", 4)
        with stopped():
            self.attempt(directory / "run", 4, stop_at=10)
        before = self.seen
        rest = self.attempt(directory / "run", factor)
        assert before == expected[:80]
        assert rest == expected[80:]
        assert (self.begun_at, self.steps) == (10, 10 + 20 // factor)

    @pytest.mark.parametrize("factor", [4, 2])
    def test_samples_go_on_and_the_step_is_that_of_the_optimizer(self, tmp_path: Path, factor: int) -> None:
        self.play(tmp_path, factor)
        assert self.restored is not None
        said = [str(change) for change in self.restored.config]
        assert said == ([] if factor == 4 else ["config.accumulate: 4 -> 2"])

    @pytest.mark.parametrize(
        "count",
        [lambda plan: plan.skip_batches // 4, lambda plan: plan.skip_batches * 4],
        ids=["less", "more"],
    )
    def test_they_do_not_where_steps_are_taken_for_batches_or_the_reverse(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Any
    ) -> None:
        monkeypatch.setattr(index_stream, "IndexStream", broken.skipping(count))
        with fails():
            self.play(tmp_path, 2)


class TestGlobalBatch:
    """Of three times as many devices the progress is as before (huggingface/transformers#22580)."""

    def attempt(self, directory: Path, loader: DataLoader[Any], stop_at: int = -1) -> list[list[int]]:
        torch.manual_seed(3)
        seen: list[list[int]] = []
        try:
            with unbroken.Run(directory, background=False) as run:
                for _ in run.epochs(1):
                    for indices in run.batches(loader):
                        seen.append(indices.tolist())
                        if run.step_count + 1 == stop_at:
                            ask_to_stop()
                        run.step()
        except SystemExit:
            pass
        return seen

    def shuffled(self, size: int) -> DataLoader[Any]:
        return DataLoader(range(400), size, shuffle=True)  # type: ignore[arg-type]

    def play(self, directory: Path) -> None:
        order = [index for few in self.attempt(directory / "whole", self.shuffled(8)) for index in few]
        before = self.attempt(directory / "run", self.shuffled(8), stop_at=10)
        rest = self.attempt(directory / "run", self.shuffled(24))
        assert [index for few in before for index in few] == order[:80]
        assert [len(few) for few in rest] == [24] * 13 + [8]
        assert [index for few in rest for index in few] == order[80:]

    def test_the_next_sample_is_the_next_of_the_order_and_both_sizes_are_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.play(tmp_path)
        assert "batch_size: checkpoint has 8, found 24" in capsys.readouterr().err

    def test_it_is_not_where_the_position_is_a_number_of_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        skipping = broken.skipping(lambda plan: plan.skip_batches)
        monkeypatch.setattr(index_stream, "IndexStream", skipping)
        with fails():
            self.play(tmp_path)

    @pytest.mark.parametrize("rank", [0, 7, 23])
    def test_each_of_more_devices_goes_on_with_its_share_of_the_same_order(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int
    ) -> None:
        def share(rank: int, devices: int) -> DataLoader[Any]:
            sampler = unbroken.ElasticSampler(range(240), rank=rank, world_size=devices)
            return DataLoader(range(240), 1, sampler=sampler)  # type: ignore[arg-type]

        order = [index for (index,) in self.attempt(tmp_path / "whole", share(0, 1))]
        before = self.attempt(tmp_path / "run", share(0, 8), stop_at=10)
        rest = self.attempt(tmp_path / "run", share(rank, 24))

        assert [index for (index,) in before] == order[0:80:8]
        assert [index for (index,) in rest] == order[80 + rank :: 24]
        assert "sampler.world_size: checkpoint has 8, found 24" in capsys.readouterr().err
