"""The samples of a batch: their indices, for each batch that training got lately."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from unbroken.frameworks.torch import delivered
from unbroken.frameworks.torch.delivered import Delivered
from unbroken.frameworks.torch.family import keyed_loader, resumable_loader

SAMPLES, SIZE = 22, 4
DATA = TensorDataset(torch.arange(SAMPLES))


def build(kind: str, workers: int) -> Any:
    """Return a loader whose samples are their own indices, made resumable."""
    if kind == "batch sampler":
        cut = BatchSampler(RandomSampler(DATA), SIZE, drop_last=True)
        return resumable_loader(DataLoader(DATA, batch_sampler=cut, num_workers=workers))
    loader = DataLoader(DATA, SIZE, shuffle=kind != "in order", num_workers=workers)
    return keyed_loader(loader, "") if kind == "keyed" else resumable_loader(loader)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 0) for kind in ("in order", "shuffle", "batch sampler", "keyed")),
        *(pytest.param(kind, 2, marks=pytest.mark.chaos) for kind in ("shuffle", "keyed")),
    ],
)
def test_the_indices_are_those_of_the_samples_also_after_a_resume(kind: str, workers: int) -> None:
    first = build(kind, workers)
    batches = first.iterate()
    for (batch,) in itertools.islice(batches, 3):
        assert first.samples(1) == batch.tolist()
    state = first.state()

    second = build(kind, workers)
    second.restore(state)
    assert second.samples(1) is None
    seen = []
    for (batch,) in second.iterate(inside_epoch=True):
        seen.append(batch.tolist())
        assert [second.samples(back) for back in range(len(seen), 0, -1)] == seen
    assert len(seen) == (2 if kind == "batch sampler" else 3)
    assert second.samples(len(seen) + 1) is None
    second.iterate()
    assert second.samples(1) is None


def test_items_of_a_stream_have_none() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    found = resumable_loader(DataLoader(Stream(), 4))
    assert found is not None
    next(found.iterate())

    assert found.samples(1) is None


def test_only_so_many_are_kept_and_always_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivered, "_MOST_BATCHES", 3)
    monkeypatch.setattr(delivered, "_MOST_SAMPLES", 10)
    kept = Delivered()
    for number in range(5):
        kept.add([number])
    assert [kept.samples(back) for back in (1, 3, 4)] == [[4], [2], None]

    kept.add(range(9))
    assert kept.samples(2) == [4]
    kept.add(range(50))
    assert (kept.samples(1), kept.samples(2)) == ([*range(50)], None)


def test_indices_of_any_kind_are_plain_values() -> None:
    kept = Delivered()
    kept.add([torch.tensor(3), ("a", 1), "name"])

    assert kept.samples(1) == [3, ["a", 1], "name"]
