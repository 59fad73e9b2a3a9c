"""A DataLoader over an IterableDataset goes on, in another process, with the very batch it stopped at."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.frameworks.loader_scenarios import fresh_python, in_own_process
from tests.frameworks.stream_scenarios import (
    BATCH,
    EPOCHS,
    ITEMS,
    KINDS,
    Plain,
    Scenario,
    WithState,
    build_loader,
    cut_and_resumed,
    finished_run,
    killed_run,
    plain_log,
)
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.torch.iterable_loader import ResumableIterableLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = [(0, False), (2, False), (2, True), (3, True)]


def scenarios() -> list[Any]:
    """Return every kind with every set-up of workers; three of four of them are for the long tests."""
    return [
        pytest.param(
            Scenario(
                kind=kind,
                workers=workers,
                persistent=persistent,
                leave_after=6 if kind == "endless" else None,
                draws_in_collate=workers == 2,
            ),
            marks=[pytest.mark.chaos] if (row + column) % 4 else [],
        )
        for row, kind in enumerate(KINDS)
        for column, (workers, persistent) in enumerate(WORKERS)
    ]


def moments(scenario: Scenario) -> list[int]:
    """The first batch of an epoch, its middle, its last, its end, before the next one, and the same later."""
    batches = (len(plain_log(scenario)) - EPOCHS) // EPOCHS
    epoch = batches + 2
    return sorted({1, 3, batches, epoch - 1, epoch, epoch + 2, 2 * epoch})


@pytest.mark.parametrize("scenario", scenarios(), ids=str)
def test_unwrapped_uninterrupted_and_often_killed_runs_are_the_same(scenario: Scenario) -> None:
    resume = None
    for moment in moments(scenario):
        resume = killed_run(scenario, (moment,), resume)[moment]

    assert finished_run(scenario, None) == plain_log(scenario)
    assert finished_run(scenario, resume) == plain_log(scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(kind="with a state", workers=2, drop_last=True),
        Scenario(kind="with a state", workers=2, persistent=True, drop_last=True),
        Scenario(kind="plain", drop_last=True),
        pytest.param(
            Scenario(kind="plain", workers=2, batch_size=None, draws_in_collate=True),
            marks=pytest.mark.chaos,
        ),
        Scenario(kind="with an iterator's state", batch_size=None, draws_in_collate=True),
        Scenario(kind="with a state", workers=2, leave_after=3),
    ],
    ids=[
        "drop last",
        "drop last, live on",
        "drop last here",
        "no batches",
        "one by one",
        "left by some",
    ],
)
def test_short_batches_no_batches_and_epochs_left_early_are_continued(scenario: Scenario) -> None:
    end = len(plain_log(scenario)) + EPOCHS
    resume = None
    for moment in sorted({2, 5, 6, 7, end // 2, end - 3}):
        resume = killed_run(scenario, (moment,), resume)[moment]

    assert finished_run(scenario, resume) == plain_log(scenario)


@pytest.mark.chaos
def test_workers_that_are_spawned_are_continued() -> None:
    program = """
import json
from tests.frameworks.stream_scenarios import Scenario, cut_and_resumed
if __name__ == "__main__":
    print(json.dumps(cut_and_resumed(Scenario(kind="with a state", workers=2, start_method="spawn"))))
"""
    done = fresh_python(program)

    forked = in_own_process(cut_and_resumed, Scenario(kind="with a state", workers=2))
    assert json.loads(done.stdout) == forked


class Counted(IterableDataset[int]):
    """Tells what is read of it, with or without a state."""

    def __init__(self, count: int = 20) -> None:
        self.count = count
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(self.count):
            self.reads.append(index)
            yield index


class CountedWithState(Counted):
    def __init__(self, count: int = 20) -> None:
        super().__init__(count)
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.count:
            self.reads.append(self.next)
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def after_two_batches(dataset: IterableDataset[Any], **options: Any) -> dict[str, Any]:
    loader = ResumableIterableLoader(DataLoader(dataset, BATCH, **options))
    batches = loader.iterate()
    next(batches)
    next(batches)
    return loader.state()


def resumed(dataset: IterableDataset[Any], state: dict[str, Any], **options: Any) -> list[Any]:
    loader = ResumableIterableLoader(DataLoader(dataset, BATCH, **options))
    loader.restore(state)
    return [batch.tolist() for batch in loader.iterate(inside_epoch=True)]


def test_with_a_state_no_consumed_item_is_read_again() -> None:
    state = after_two_batches(CountedWithState())
    dataset = CountedWithState()

    assert resumed(dataset, state)[0] == [8, 9, 10, 11]
    assert dataset.reads == list(range(8, 20))


def test_without_a_state_items_are_read_again_but_not_collated() -> None:
    state = after_two_batches(Counted())
    dataset, collated = Counted(), []

    def note(samples: list[int]) -> torch.Tensor:
        collated.append(samples)
        return torch.tensor(samples)

    assert resumed(dataset, state)[0] == [8, 9, 10, 11]
    assert dataset.reads == list(range(20))
    # A function of the user's may draw: what it drew is drawn again.
    resumed(Counted(), state, collate_fn=note)
    assert collated[0] == [0, 1, 2, 3]


def test_reading_again_is_said_at_the_start_with_its_cost(capfd: pytest.CaptureFixture[str]) -> None:
    after_two_batches(Counted())
    without = capfd.readouterr().err
    after_two_batches(CountedWithState())

    assert "Counted has no state_dict" in without
    assert "reads its consumed items again" in without
    assert without.count("unbroken:") == 1
    assert capfd.readouterr().err == ""


class DrawsWithTraining(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(100)


def test_reading_that_draws_in_turn_with_training_is_pointed_out(capfd: pytest.CaptureFixture[str]) -> None:
    loader = ResumableIterableLoader(DataLoader(DrawsWithTraining(), BATCH))
    for _, _ in zip(range(4), loader.iterate(), strict=False):
        random.random()

    assert "and so does training in between" in capfd.readouterr().err


class OtherEachTime(Counted):
    """Depends on more than data and generators."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.rng.random(self.count)
            yield index


def test_a_worker_that_draws_otherwise_when_it_reads_again_is_refused() -> None:
    def job() -> str:
        state = after_two_batches(OtherEachTime(20), num_workers=2)
        with pytest.raises(StateMismatchError, match="drew other random numbers") as caught:
            resumed(OtherEachTime(21), state, num_workers=2)
        return caught.value.hint

    assert "state_dict" in in_own_process(job)


def test_fewer_items_than_were_consumed_are_refused() -> None:
    with pytest.raises(StateMismatchError, match="expected at least 8 items, found 5"):
        resumed(Counted(5), after_two_batches(Counted()))


class Stuck(CountedWithState):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_does_not_move_is_refused_at_the_second_batch(workers: int) -> None:
    def job() -> str:
        loader = ResumableIterableLoader(DataLoader(Stuck(), BATCH, num_workers=workers))
        with pytest.raises(UnsupportedStateError, match="the same state after two batches") as caught:
            list(loader.iterate())
        return caught.value.hint

    assert "how far it is read" in in_own_process(job)


class Sticky(CountedWithState):
    """A loaded state tells every pass where to begin."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.start, self.count):
            self.next = index + 1
            yield index

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


def test_a_loaded_state_that_every_later_pass_would_begin_with_is_refused() -> None:
    loader = ResumableIterableLoader(DataLoader(Sticky(), BATCH))
    loader.restore(after_two_batches(Sticky()))
    assert len(list(loader.iterate(inside_epoch=True))) == 3

    with pytest.raises(StateMismatchError, match="every pass over a Sticky begins where"):
        list(loader.iterate())


class CountsTwice(CountedWithState):
    """From its end it gives the empty rest, and counts that as an epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.count:
            self.next += 1
            yield self.next - 1
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


def test_an_end_that_does_not_lead_to_the_next_epoch_is_refused() -> None:
    loader = ResumableIterableLoader(DataLoader(CountsTwice(), BATCH))
    list(loader.iterate())
    again = ResumableIterableLoader(DataLoader(CountsTwice(), BATCH))
    again.restore(loader.state())

    with pytest.raises(StateMismatchError, match="by the empty rest of it"):
        list(again.iterate())


def test_an_epoch_left_early_says_that_its_position_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    loader = ResumableIterableLoader(DataLoader(WithState(), BATCH))
    batches: Any = loader.iterate()
    next(batches)
    batches.close()
    state = loader.state()
    again = ResumableIterableLoader(DataLoader(WithState(), BATCH))
    again.restore(state)

    assert "a pass over a WithState was left early" in capfd.readouterr().err
    with pytest.raises(UnsupportedStateError, match="was left early"):
        list(again.iterate())


class NeedsTelling(Counted):
    def state_dict(self, samples: int) -> dict[str, Any]:
        return {"samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (DataLoader(Counted(), num_workers=1, in_order=False), "in_order=False"),
        (OwnIteration(Counted()), "OwnIteration"),
        (DataLoader(NeedsTelling()), "without arguments"),
    ],
    ids=["out of order", "an iteration of its own", "a state that has to be told"],
)
def test_what_cannot_be_continued_is_refused_at_the_start(loader: DataLoader[Any], found: str) -> None:
    with pytest.raises(UnsupportedStateError, match=found) as caught:
        ResumableIterableLoader(loader)

    assert caught.value.hint


def test_another_loader_is_refused_and_named() -> None:
    state = after_two_batches(CountedWithState())

    with pytest.raises(StateMismatchError, match=r"batch_size: .* 4, found 5.*num_workers: .* 0, found 1"):
        ResumableIterableLoader(DataLoader(CountedWithState(), 5, num_workers=1)).restore(state)


def test_a_dataset_that_has_lost_its_state_dict_is_refused() -> None:
    state = after_two_batches(CountedWithState())
    state["fingerprint"]["dataset"] = "Counted"

    with pytest.raises(StateMismatchError, match="by its state_dict, found one that is continued by reading"):
        resumed(Counted(), state)


def test_one_pass_at_a_time() -> None:
    loader = ResumableIterableLoader(DataLoader(Counted(), BATCH))
    earlier = loader.iterate()
    next(earlier)
    later = loader.iterate()

    with pytest.raises(UsageError, match="one iteration at a time"):
        next(earlier)

    assert len(list(later)) == 5


def test_the_users_loader_is_left_alone() -> None:
    plain = build_loader(Scenario())
    before = dict(vars(plain))

    assert len(list(ResumableIterableLoader(plain).iterate())) == -(-ITEMS // BATCH)

    assert dict(vars(plain)) == before
    assert isinstance(plain.dataset, Plain)
