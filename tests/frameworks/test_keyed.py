"""Keyed randomness: the same samples, bit for bit, for any number of workers and ranks and any batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unbroken
from tests.frameworks.loader_scenarios import in_own_process, noise, seed_all, seed_from_worker
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.rng import capture_global_rng
from unbroken.frameworks.torch.keyed import KeyedLoader

SAMPLES = 23


class Augmented(Dataset[Any]):
    """Draws from the global generators and from three of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(9)
        self.own = [random.Random(1), torch.Generator(), np.random.RandomState(2), np.random.Philox(3)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        python, generator, legacy, philox = self.own
        drawn = [
            random.random(),
            float(np.random.rand()),
            float(torch.rand((), dtype=torch.float64)),
            float(self.rng.normal()),
            python.random(),  # type: ignore[union-attr]
            float(torch.rand((), generator=generator)),  # type: ignore[arg-type]
            float(legacy.rand()),  # type: ignore[union-attr]
            float(philox.random_raw()),  # type: ignore[union-attr]
        ]
        return index, torch.tensor(drawn, dtype=torch.float64)


def build(size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), size, **{"shuffle": "sampler" not in options, **options})


def samples(batches: Iterator[Any]) -> list[tuple[int, bytes]]:
    return [
        (int(index), drawn.numpy().tobytes())
        for indices, rows in batches
        for index, drawn in zip(indices, rows, strict=True)
    ]


def two_epochs(loader: DataLoader[Any]) -> list[tuple[int, bytes]]:
    keyed = KeyedLoader(loader, seed=5)
    return samples(keyed.iterate()) + samples(keyed.iterate())


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 4, 23])
def test_every_sample_is_the_same_for_any_number_of_workers_and_any_batches(workers: int, size: int) -> None:
    expected = in_own_process(lambda: two_epochs(build()))
    options = {"num_workers": workers, "persistent_workers": workers == 3}

    found = in_own_process(lambda: two_epochs(build(size, **options)))

    assert found == expected
    assert sorted(index for index, _ in found[:SAMPLES]) == list(range(SAMPLES))
    assert found[:SAMPLES] != found[SAMPLES:]


def test_the_generators_that_a_worker_init_function_makes_are_keyed_too() -> None:
    def job() -> Any:
        from tests.frameworks.loader_scenarios import Augmented as WithReads

        def log(workers: int) -> list[bytes]:
            loader = DataLoader(WithReads(), 4, num_workers=workers, worker_init_fn=seed_from_worker)
            return [rows.numpy().tobytes() for rows, _ in KeyedLoader(loader, seed=1).iterate()]

        return log(1) == log(1), len(set(log(1)))

    assert in_own_process(job) == (True, 11)


def test_ranks_read_together_what_one_rank_reads() -> None:
    whole = two_epochs(build())
    for world_size in (2, 3):
        shares = [
            two_epochs(build(sampler=unbroken.ElasticSampler(Augmented(), rank=rank, world_size=world_size)))
            for rank in range(world_size)
        ]
        assert sorted(itertools.chain(*shares)) == sorted(whole)


def test_a_distributed_sampler_gives_the_ranks_and_pads_as_it_does() -> None:
    whole = dict(samples(KeyedLoader(build(), seed=5).iterate()))
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(Augmented(), num_replicas=2, rank=rank)
        shares.append(samples(KeyedLoader(build(sampler=sampler), seed=5).iterate()))

    assert [len(share) for share in shares] == [12, 12]
    assert {index for share in shares for index, _ in share} == set(range(SAMPLES))
    assert all(whole[index] == drawn for index, drawn in shares[0])


@pytest.mark.parametrize("stop", range(7))
def test_it_goes_on_with_other_workers_and_other_batches(stop: int) -> None:
    whole = two_epochs(build())
    first = KeyedLoader(build(), seed=5)
    batches = first.iterate()
    seen = samples(itertools.islice(batches, stop))
    state = first.state()

    second = KeyedLoader(build(5), seed=5)
    second.restore(state)
    assert second.state() == state
    seen += samples(second.iterate(inside_epoch=True))
    between = second.state()
    third = KeyedLoader(build(6), seed=5)
    third.restore(between)
    assert samples(third.iterate(inside_epoch=True)) == []
    seen += samples(third.iterate())

    assert seen == whole


def test_leaving_an_epoch_early_ends_it() -> None:
    keyed = KeyedLoader(build(), seed=5)
    batches = keyed.iterate()
    next(batches)
    batches.close()  # type: ignore[attr-defined]

    assert keyed.state()["keyed"] == {"seed": 5, "epoch": 1, "position": 0, "name": ""}
    assert samples(keyed.iterate()) == two_epochs(build())[SAMPLES:]


def test_the_generators_of_the_training_process_are_left_alone() -> None:
    seed_all(3)
    before, expected = capture_global_rng(), noise()
    seed_all(3)
    data = Augmented()
    keyed = KeyedLoader(DataLoader(data, 4, shuffle=True), seed=5)
    own = data.rng.bit_generator.state
    batches = keyed.iterate()
    next(batches)

    assert capture_global_rng() == before
    assert data.rng.bit_generator.state == own
    assert noise() == expected


def test_collating_is_keyed_by_the_first_position_of_the_batch() -> None:
    def collate(samples: list[Any]) -> float:
        return random.random()

    def log(workers: int) -> list[float]:
        loader = build(num_workers=workers, collate_fn=collate)
        return list(KeyedLoader(loader, seed=5).iterate())

    first = in_own_process(log, 0)
    assert len(set(first)) == 6
    assert in_own_process(log, 2) == first


def test_loaders_that_share_a_seed_draw_other_numbers_by_their_names() -> None:
    def make(name: str) -> KeyedLoader:
        sampler = DistributedSampler(Augmented(), num_replicas=1, rank=0)
        return KeyedLoader(build(sampler=sampler), name=name)

    first, second = (samples(make(name).iterate()) for name in "ab")
    assert [index for index, _ in first] == [index for index, _ in second]
    assert not {drawn for _, drawn in first} & {drawn for _, drawn in second}

    renamed = make("b")
    renamed.restore(make("a").state())
    assert samples(renamed.iterate()) == first


def test_the_last_batch_is_dropped_where_the_loader_drops_it() -> None:
    keyed = KeyedLoader(build(drop_last=True), seed=5)

    assert [len(batch[0]) for batch in keyed.iterate()] == [4] * 5
    assert keyed.state()["keyed"]["position"] == 0


def test_a_position_of_other_data_or_of_another_seed_is_refused() -> None:
    keyed = KeyedLoader(DataLoader(TensorDataset(torch.arange(8)), 2), seed=5)
    next(keyed.iterate())
    batches = keyed.iterate()
    next(batches)
    state = keyed.state()

    with pytest.raises(StateMismatchError, match="dataset_length: checkpoint has 8, found 9"):
        KeyedLoader(DataLoader(TensorDataset(torch.arange(9)), 2), seed=5).restore(state)
    with pytest.raises(StateMismatchError, match="seed: checkpoint has 5, found 6"):
        KeyedLoader(DataLoader(TensorDataset(torch.arange(8)), 2), seed=6).restore(state)
    with pytest.raises(UsageError, match="keyed randomness"):
        KeyedLoader(DataLoader(TensorDataset(torch.arange(8)), 2), seed=5).restore({"between_epochs": True})


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
        RandomSampler(range(SAMPLES), replacement=True),
        RandomSampler(range(10)),
        RandomSampler(range(10), num_samples=SAMPLES),
        RandomSampler(range(SAMPLES), num_samples=10),
        SequentialSampler(range(10)),
        unbroken.ElasticSampler(range(10)),
        DistributedSampler(range(10), num_replicas=1, rank=0),  # type: ignore[arg-type]
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_an_order_that_is_no_permutation_is_refused(sampler: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=f"found {type(sampler).__name__}"):
        KeyedLoader(build(sampler=sampler), seed=5)


def test_a_generator_made_while_samples_are_read_is_refused() -> None:
    class Late(Augmented):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            self.late = np.random.default_rng(index)
            return super().__getitem__(index)

    with pytest.raises(UnsupportedStateError, match=r"dataset\.late"):
        next(KeyedLoader(DataLoader(Late(), 4), seed=5).iterate())
