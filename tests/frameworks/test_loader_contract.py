"""What a position holds, what a loader refuses, and what it says then."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from tests.frameworks.loader_scenarios import (
    BATCH,
    BATCHES,
    SAMPLES,
    Augmented,
    Scenario,
    build_loader,
    in_own_process,
)
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.torch.loader import ResumableLoader
from unbroken.frameworks.torch.worker_side import Envelope


class CountingSampler(Sampler[int]):
    """Its order depends on how often it was iterated, which nothing keeps."""

    def __init__(self) -> None:
        super().__init__()
        # A number in an attribute of its own would be kept.
        self.iterations = [0]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.iterations[0] += 1
        return iter([(index * 7 + self.iterations[0]) % SAMPLES for index in range(SAMPLES)])


class CountingBatches(Sampler[list[int]]):
    """Counts as soon as `iter` is called, where a generator function would wait for the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        self.iterations += 1
        return iter([[(number + self.iterations) % SAMPLES] for number in range(BATCHES)])


@pytest.mark.parametrize("moment", ["inside", "between"])
def test_new_workers_in_place_of_ones_that_lived_on_cost_the_sampler_no_extra_iteration(moment: str) -> None:
    # Torch iterates a sampler twice when it starts workers, once when they live on.
    def build() -> tuple[CountingBatches, ResumableLoader]:
        sampler = CountingBatches()
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        return sampler, ResumableLoader(DataLoader(Augmented(), batch_sampler=sampler, **options))

    def job() -> tuple[int, int]:
        sampler, loader = build()
        list(loader.iterate())
        after_first = sampler.iterations
        inside = next(loader.state() for _ in loader.iterate())
        state = inside if moment == "inside" else loader.state()
        resumed_sampler, resumed = build()
        # What a sampler counts is for whoever keeps it to restore.
        resumed_sampler.iterations = after_first if moment == "inside" else sampler.iterations
        before = resumed_sampler.iterations
        resumed.restore(state)
        list(resumed.iterate(inside_epoch=moment == "inside"))
        return after_first, resumed_sampler.iterations - before

    assert in_own_process(job) == (2, 1)


class ShrinkingSampler(CountingSampler):
    def __iter__(self) -> Iterator[int]:
        self.iterations[0] += 1
        return iter(range(SAMPLES if self.iterations[0] > 1 else BATCH))


@pytest.mark.parametrize(
    ("kind", "found"),
    [(CountingSampler, "found other indices"), (ShrinkingSampler, "expected 12 samples, found 4")],
)
def test_a_sampler_whose_order_depends_on_state_that_is_not_kept_is_refused(
    kind: type[CountingSampler], found: str
) -> None:
    def build() -> ResumableLoader:
        return ResumableLoader(DataLoader(Augmented(), BATCH, sampler=kind()))

    loader = build()
    list(loader.iterate())
    state = next(loader.state() for _ in itertools.islice(loader.iterate(), 2, 3))
    resumed = build()
    resumed.restore(state)

    with pytest.raises(StateMismatchError, match=f"order depends on state that is not kept.*{found}"):
        resumed.iterate(inside_epoch=True)


class Named(Dataset[str]):
    """A map-style dataset whose indices are no numbers."""

    def __getitem__(self, index: Any) -> Any:
        return index


def test_indices_may_be_names_and_tuples_of_plain_values() -> None:
    def build(order: list[Any]) -> ResumableLoader:
        return ResumableLoader(DataLoader(Named(), batch_sampler=[order[:2], order[2:]], collate_fn=list))

    order = ["a", ("b", 1), np.int64(3), None]
    loader = build(order)
    state = next(loader.state() for _ in loader.iterate())

    same, other = build(order), build(["a", ("b", 2), 3, None])
    same.restore(state)
    other.restore(state)

    assert list(same.iterate(inside_epoch=True)) == [[3, None]]
    with pytest.raises(StateMismatchError):
        other.iterate(inside_epoch=True)


def test_indices_that_cannot_be_compared_are_refused() -> None:
    loader = ResumableLoader(DataLoader(Named(), batch_sampler=[[object()]], collate_fn=list))

    with pytest.raises(UnsupportedStateError, match="found a object"):
        list(loader.iterate())


def test_a_restored_position_is_the_one_that_was_captured() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    inside = next(loader.state() for _ in itertools.islice(loader.iterate(), 3, 4))
    list(loader.iterate())
    between = loader.state()

    for state in (inside, between):
        other = ResumableLoader(build_loader(Scenario()))
        other.restore(state)
        assert other.state() == state

    assert (inside["epoch"], inside["batches"], inside["samples"], inside["between_epochs"]) == (
        1,
        4,
        16,
        False,
    )
    assert (between["epoch"], between["batches"], between["samples"], between["between_epochs"]) == (
        2,
        11,
        44,
        True,
    )


def test_what_the_epoch_has_left_may_be_nothing() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    at_the_last_batch = [loader.state() for _ in loader.iterate()][-1]
    exhausted = loader.state()

    for state in (at_the_last_batch, exhausted):
        calls: list[str] = []
        other = ResumableLoader(build_loader(Scenario()))
        other.restore(state)
        left = other.iterate(inside_epoch=True, after_replay=functools.partial(calls.append, "set"))
        assert list(left) == []
        assert calls == ["set"]
        assert other.state()["between_epochs"]
        assert len(list(other.iterate())) == BATCHES
        assert other.state()["epoch"] == 2


def test_a_loader_that_had_not_begun_begins_its_first_epoch_when_asked_to_go_on() -> None:
    state = ResumableLoader(build_loader(Scenario())).state()
    loader = ResumableLoader(build_loader(Scenario()))
    loader.restore(state)

    assert len(list(loader.iterate(inside_epoch=True))) == BATCHES
    assert loader.state()["epoch"] == 1


def test_every_difference_to_the_original_loader_is_named_at_once() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    batches = loader.iterate()
    next(batches)
    state = loader.state()
    other = ResumableLoader(DataLoader(range(40), batch_size=8, drop_last=True))  # type: ignore[arg-type]

    with pytest.raises(StateMismatchError) as caught:
        other.restore(state)

    for difference in (
        "batch_size: checkpoint has 4, found 8",
        "dataset_length: checkpoint has 44, found 40",
        "drop_last: checkpoint has False, found True",
        "sampler: checkpoint has 'RandomSampler', found 'SequentialSampler'",
    ):
        assert difference in str(caught.value)
    assert other.state()["epoch"] == 0


def test_a_new_epoch_does_not_silently_drop_the_rest_of_a_restored_one() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    state = next(loader.state() for _ in loader.iterate())
    other = ResumableLoader(build_loader(Scenario()))
    other.restore(state)

    with pytest.raises(UsageError, match="go on in epoch 1 after batch 1"):
        other.iterate()

    assert len(list(other.iterate(inside_epoch=True))) == BATCHES - 1


def test_going_on_needs_a_restored_state() -> None:
    with pytest.raises(UsageError, match="restored state"):
        ResumableLoader(build_loader(Scenario())).iterate(inside_epoch=True)


def test_a_loader_is_restored_before_it_is_iterated_or_not_at_all() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    list(loader.iterate())

    with pytest.raises(UsageError, match="before the first iteration"):
        loader.restore(loader.state())


def test_an_earlier_iteration_refuses_to_go_on_next_to_a_later_one() -> None:
    loader = ResumableLoader(build_loader(Scenario()))
    earlier = loader.iterate()
    next(earlier)
    later = loader.iterate()

    with pytest.raises(UsageError, match="one iteration at a time"):
        next(earlier)

    assert len(list(later)) == BATCHES
    assert loader.state()["epoch"] == 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (DataLoader(Stream()), "Stream"),
        (DataLoader(Augmented(), batch_size=None), "batch_size=None"),
        (DataLoader(Augmented(), num_workers=1, in_order=False), "in_order=False"),
        (OwnIteration(Augmented()), "OwnIteration"),
    ],
    ids=["a stream", "no batches", "out of order", "an iteration of its own"],
)
def test_a_loader_that_cannot_be_resumed_is_refused_at_the_start(loader: DataLoader[Any], found: str) -> None:
    with pytest.raises(UnsupportedStateError, match=found) as caught:
        ResumableLoader(loader)

    assert caught.value.hint


class MakesGeneratorLate(Augmented):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not hasattr(self, "late"):
            self.late = np.random.default_rng(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_made_while_samples_are_read_is_refused_at_the_first_batch(workers: int) -> None:
    def job() -> tuple[str, str]:
        loader = ResumableLoader(
            build_loader(Scenario(kind="sequential", workers=workers), MakesGeneratorLate())
        )
        with pytest.raises(UnsupportedStateError) as caught:
            next(loader.iterate())
        return caught.value.message, caught.value.hint

    message, hint = in_own_process(job)

    assert "dataset.late" in message
    assert "worker_init_fn" in hint


class HasPinMemory:
    def __init__(self) -> None:
        self.is_pinned = False

    def pin_memory(self) -> HasPinMemory:
        self.is_pinned = True
        return self


def test_pinning_reaches_the_batch_inside_its_envelope() -> None:
    envelope = Envelope(HasPinMemory(), worker=1, rng={"global": {"python": (3, b"words", None)}})

    pinned = cast("Any", pin_memory)(envelope)

    assert isinstance(pinned, Envelope)
    assert pinned.batch.is_pinned
    assert (pinned.worker, pinned.rng) == (envelope.worker, envelope.rng)


def test_the_length_is_that_of_the_loader() -> None:
    assert len(ResumableLoader(build_loader(Scenario()))) == BATCHES


def test_the_users_loader_is_left_alone() -> None:
    plain = build_loader(Scenario())
    before = dict(vars(plain))
    loader = ResumableLoader(plain)

    list(loader.iterate())

    assert vars(plain) == before
