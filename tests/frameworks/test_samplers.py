"""A ledger for every kind of sampler: the indices of a run that is stopped are those of one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
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
)

import unbroken
from tests.frameworks.loader_scenarios import in_own_process
from unbroken.errors import StateMismatchError
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.loader import ResumableLoader

SAMPLES, BATCH, EPOCHS = 22, 4, 3
Stop = tuple[int, int | str]
Ledger = list[list[int]]


class Indices(Dataset[int]):
    """Its samples are their own indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Curriculum(Indices):
    """Counts what it reads: its samples depend on how many came before."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index + 100 * self.reads


class CountsEpochs(Sampler[int]):
    """Shuffles by an epoch number that it counts itself, when iteration begins."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())


class CountsAtTheEnd(CountsEpochs):
    """Counts when all was drawn."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


class CountingBatches(BatchSampler):
    """A batch sampler of its own that counts, and whose batches grow."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), BATCH, drop_last=False)
        self.rounds = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.rounds += 1
        order = [(index * 3 + self.rounds) % SAMPLES for index in range(SAMPLES)]
        first = 0
        while first < SAMPLES:
            size = 2 + first % 3
            yield order[first : first + size]
            first += size


class Wraps(Sampler[int]):
    """Wraps a sampler that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = CountsEpochs()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return reversed(list(self.sampler))


class OwnGenerator(CountsEpochs):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(8)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, (), generator=self.generator))


def distributed(**options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(Indices(), num_replicas=2, rank=1, **options)


def build(kind: str, workers: int) -> DataLoader[Any]:
    data: Any = Curriculum() if kind == "a dataset that counts" else Indices()
    seeded = torch.Generator().manual_seed(5)
    weights = [1.0 + index % 3 for index in range(SAMPLES)]
    options: dict[str, dict[str, Any]] = {
        "sequential": {},
        "random": {"shuffle": True},
        "random, drop_last": {"shuffle": True, "drop_last": True},
        "random by a generator": {"shuffle": True, "generator": seeded},
        "with replacement": {"sampler": RandomSampler(data, replacement=True, num_samples=35)},
        "some of the data": {"sampler": RandomSampler(data, num_samples=9, generator=seeded)},
        "more than the data": {"sampler": RandomSampler(data, num_samples=50)},
        "weighted": {"sampler": WeightedRandomSampler(weights, 30)},
        "weighted by a generator": {"sampler": WeightedRandomSampler(weights, 30, generator=seeded)},
        "subset": {"sampler": SubsetRandomSampler(range(3, 18), generator=seeded)},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(data), BATCH, drop_last=True)},
        "distributed": {"sampler": distributed(seed=2)},
        "distributed, drop_last": {"sampler": distributed(drop_last=True), "drop_last": True},
        "elastic": {"sampler": unbroken.ElasticSampler(data, rank=1, world_size=2)},
        "counts its epochs": {"sampler": CountsEpochs()},
        "counts at the end": {"sampler": CountsAtTheEnd()},
        "batches that count": {"batch_sampler": CountingBatches()},
        "wraps one that counts": {"sampler": Wraps()},
        "a generator of its own": {"sampler": OwnGenerator()},
        "a dataset that counts": {"shuffle": True},
    }
    size = {} if "batch_sampler" in options[kind] else {"batch_size": BATCH}
    return DataLoader(data, num_workers=workers, **size, **options[kind])


KINDS = [
    "sequential",
    "random",
    "random, drop_last",
    "random by a generator",
    "with replacement",
    "some of the data",
    "more than the data",
    "weighted",
    "weighted by a generator",
    "subset",
    "batch sampler",
    "distributed",
    "distributed, drop_last",
    "elastic",
    "counts its epochs",
    "counts at the end",
    "batches that count",
    "wraps one that counts",
    "a generator of its own",
    "a dataset that counts",
]
PLANS: list[list[Stop]] = [
    [(0, 1), (1, 2), (2, 1)],
    [(1, 1), (1, 2)],
    [(0, 2), (0, "last"), (0, "exhausted"), (0, "after"), (1, 1)],
    [(1, "last"), (2, "exhausted")],
    [(0, "after"), (1, "after")],
]


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def plain(kind: str, workers: int) -> list[Ledger]:
    torch.manual_seed(0)
    loader, epochs = build(kind, workers), []
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        epochs.append([batch.tolist() for batch in loader])
        torch.rand(1)
    return epochs


class Trainer:
    """One process of a run: trains until `stop`, and then is as good as killed."""

    def __init__(self, kind: str, workers: int, checkpoint: dict[str, Any] | None) -> None:
        torch.manual_seed(0 if checkpoint is None else 17)
        self.plain = build(kind, workers)
        self.loader = ResumableLoader(self.plain)
        self.checkpoint = checkpoint

    def train(self, ledger: list[Ledger], stop: Stop | None) -> dict[str, Any]:
        first = self.checkpoint["epoch"] if self.checkpoint else 0
        for epoch in range(first, EPOCHS):
            set_epoch(self.plain, epoch)
            batches = self._begin()
            for batch in batches:
                ledger[epoch].append(batch.tolist())
                if stop == (epoch, len(ledger[epoch])) or (
                    stop == (epoch, "last") and self.loader.state()["batches"] == self._count(epoch, ledger)
                ):
                    return self._state(epoch, is_inside=True)
            if stop in ((epoch, "exhausted"), (epoch, "last")):
                return self._state(epoch, is_inside=True)
            torch.rand(1)
            if stop == (epoch, "after"):
                return self._state(epoch + 1, is_inside=False)
        return {}

    def _begin(self) -> Iterator[Any]:
        checkpoint, self.checkpoint = self.checkpoint, None
        if checkpoint is None:
            return self.loader.iterate()
        self.loader.restore(checkpoint["loader"])
        if not checkpoint["is_inside"]:
            restore_present_rng(checkpoint["rng"])
            return self.loader.iterate()
        return self.loader.iterate(
            inside_epoch=True, after_replay=lambda: restore_present_rng(checkpoint["rng"])
        )

    def _count(self, epoch: int, ledger: list[Ledger]) -> int:
        return len(self.plain) if not isinstance(self.plain.batch_sampler, CountingBatches) else 7

    def _state(self, epoch: int, *, is_inside: bool) -> dict[str, Any]:
        rng = capture_global_rng()
        return {"loader": self.loader.state(), "rng": rng, "epoch": epoch, "is_inside": is_inside}


def stopped(kind: str, workers: int, plan: list[Stop]) -> list[Ledger]:
    ledger: list[Ledger] = [[] for _ in range(EPOCHS)]
    checkpoint: dict[str, Any] | None = None
    for stop in [*plan, None]:
        checkpoint = Trainer(kind, workers, checkpoint).train(ledger, stop)
    return ledger


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_of_a_run_stopped_anywhere_is_that_of_the_plain_loader(kind: str) -> None:
    expected = plain(kind, 0)

    for plan in PLANS:
        assert stopped(kind, 0, plan) == expected, plan


@pytest.mark.parametrize(
    "kind",
    [
        "random by a generator",
        pytest.param("weighted", marks=pytest.mark.chaos),
        pytest.param("distributed", marks=pytest.mark.chaos),
        pytest.param("elastic", marks=pytest.mark.chaos),
        pytest.param("counts its epochs", marks=pytest.mark.chaos),
        "batches that count",
    ],
)
def test_so_it_is_with_workers_that_prefetch(kind: str) -> None:
    def job() -> list[bool]:
        expected = plain(kind, 2)
        return [stopped(kind, 2, plan) == expected for plan in PLANS[:3]]

    assert in_own_process(job) == [True, True, True]


@pytest.mark.parametrize(
    "kind", ["random", "random, drop_last", "distributed", "elastic", "counts its epochs"]
)
def test_every_index_comes_at_most_once_in_an_epoch(kind: str) -> None:
    for epoch in stopped(kind, 0, PLANS[2]):
        seen = [index for batch in epoch for index in batch]
        assert len(set(seen)) == len(seen)
        assert len(seen) == {"random": 22, "random, drop_last": 20, "distributed": 11, "elastic": 11}.get(
            kind, 22
        )


def test_a_distributed_sampler_of_another_world_size_is_refused_and_says_what_differs() -> None:
    loader = ResumableLoader(build("distributed", 0))
    next(batches := loader.iterate())
    sampler = DistributedSampler(Indices(), num_replicas=3, rank=1, seed=2)
    other = ResumableLoader(DataLoader(Indices(), BATCH, sampler=sampler))

    with pytest.raises(StateMismatchError, match=r"sampler\.num_replicas: checkpoint has 2, found 3"):
        other.restore(loader.state())
    del batches


def test_an_epoch_that_the_script_sets_is_not_overruled_between_two_epochs() -> None:
    # Set to the same few values again and again, as one that the sampler counts never would be.
    def build_set(epoch: int) -> ResumableLoader:
        sampler = distributed()
        sampler.set_epoch(epoch)
        return ResumableLoader(DataLoader(Indices(), BATCH, sampler=sampler))

    loader = build_set(0)
    list(loader.iterate())
    loader._loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    list(loader.iterate())
    other = build_set(0)
    other.restore(loader.state())

    assert [batch.tolist() for batch in other.iterate()] == [
        batch.tolist() for batch in build_set(0).iterate()
    ]


def test_a_setting_that_differs_between_two_machines_is_left_alone() -> None:
    class AtAPlace(Indices):
        def __init__(self, root: str) -> None:
            self.root = root

    loader = ResumableLoader(DataLoader(AtAPlace("/here"), BATCH, shuffle=True))
    next(batches := loader.iterate())
    data = AtAPlace("/there")
    other = ResumableLoader(DataLoader(data, BATCH, shuffle=True))
    other.restore(loader.state())
    del batches

    assert len(list(other.iterate(inside_epoch=True))) == 5
    assert data.root == "/there"


def test_a_position_has_no_index_in_it() -> None:
    sizes = []
    for length in (100, 10_000):
        loader = ResumableLoader(DataLoader(range(length), 10, shuffle=True))  # type: ignore[arg-type]
        next(batches := loader.iterate())
        sizes.append(len(repr(loader.state())))
        del batches

    assert sizes[1] < sizes[0] * 1.02
