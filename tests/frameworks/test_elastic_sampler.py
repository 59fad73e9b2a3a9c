"""One global order of samples, whatever the number of ranks, and however it changes."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import unbroken
from tests.frameworks.loader_scenarios import in_own_process
from unbroken.errors import StateMismatchError, UsageError
from unbroken.frameworks.torch.loader import ResumableLoader
from unbroken.frameworks.torch.permutation import Permutation, indices_at

LENGTH = 29
DATA = TensorDataset(torch.arange(LENGTH))


class CutOffError(Exception):
    pass


def sampler(rank: int = 0, world_size: int = 1, **options: Any) -> unbroken.ElasticSampler:
    return unbroken.ElasticSampler(DATA, rank=rank, world_size=world_size, **{"seed": 3, **options})


def build(size: int, rank: int, world_size: int, **options: Any) -> ResumableLoader:
    workers = options.pop("num_workers", 0)
    loader = DataLoader(DATA, size, sampler=sampler(rank, world_size, **options), num_workers=workers)
    return ResumableLoader(loader)


def merged(shares: list[list[int]]) -> list[int]:
    """The global order again, of which each rank took its turns."""
    turns = itertools.zip_longest(*shares)
    return [index for turn in turns for index in turn if index is not None]


def indices(batches: Iterator[Any]) -> list[int]:
    return [int(index) for (batch,) in batches for index in batch]


@pytest.mark.parametrize("length", [1, 2, 3, 10, 97, 4097])
def test_a_permutation_has_every_index_once(length: int) -> None:
    orders = {
        tuple(indices_at(range(length), Permutation(length, seed=1, epoch=epoch), length))
        for epoch in range(5)
    }

    assert all(sorted(order) == list(range(length)) for order in orders)
    assert length < 4 or len(orders) == 5


def test_all_permutations_are_about_as_likely() -> None:
    orders = collections.Counter(
        tuple(indices_at(range(4), Permutation(4, seed=1, epoch=epoch), 4)) for epoch in range(2400)
    )

    assert len(orders) == 24
    assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 60


def test_the_order_is_the_same_in_every_release() -> None:
    assert list(sampler())[:8] == [14, 5, 28, 27, 0, 12, 3, 23]
    assert list(unbroken.ElasticSampler(range(10), seed=0, rank=0, world_size=1)) == [
        8,
        6,
        4,
        1,
        0,
        5,
        2,
        7,
        3,
        9,
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_ranks_take_turns_in_one_order(world_size: int) -> None:
    whole = list(sampler())
    shares = [list(sampler(rank, world_size)) for rank in range(world_size)]

    assert merged(shares) == whole
    assert [len(share) for share in shares] == [len(sampler(rank, world_size)) for rank in range(world_size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_uneven_ends_are_dropped_or_padded_on_request() -> None:
    whole = list(sampler())
    dropped = [list(sampler(rank, 3, drop_last=True)) for rank in range(3)]
    padded = [list(sampler(rank, 3, pad=True)) for rank in range(3)]

    assert merged(dropped) == whole[:27]
    assert merged(padded) == whole + whole[:1]
    with pytest.raises(UsageError, match="found both"):
        sampler(drop_last=True, pad=True)


def test_epochs_are_counted_or_set() -> None:
    counting, set_by_script = sampler(), sampler()
    first, second = list(counting), list(counting)
    set_by_script.set_epoch(1)

    assert first != second
    assert list(set_by_script) == second
    assert (counting.epoch, set_by_script.epoch) == (1, 1)
    assert list(sampler(shuffle=False)) == list(range(LENGTH))


def test_the_state_is_two_numbers_and_goes_on_anywhere_in_any_epoch() -> None:
    reference = sampler()
    whole = [list(reference) for _ in range(3)]
    for epoch, taken in itertools.product(range(2), (0, 1, 13, LENGTH)):
        one = sampler()
        for _ in range(epoch):
            list(one)
        order = iter(one)
        for _ in range(taken):
            next(order)
        state = one.state_dict()
        other = sampler()
        other.load_state_dict(state)
        expected = whole[epoch][taken:] or whole[epoch + 1]
        assert list(other) == expected
        assert len(repr(state)) < 100
    with pytest.raises(StateMismatchError, match="seed: checkpoint has 3, found 4"):
        sampler(seed=4).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("worlds", [(1, 2, 3, 1), (3, 1, 2), (2, 2)], ids=str)
def test_the_rest_of_the_same_order_comes_when_the_world_size_changes(
    worlds: tuple[int, ...], workers: int
) -> None:
    def job() -> list[list[int]]:
        epochs: list[list[int]] = [[]]
        state: dict[str, Any] | None = None
        # Each world takes three steps with six samples in all, then one epoch and two steps.
        for steps, world_size in [*zip(itertools.repeat(2), worlds, strict=False), (99, worlds[-1])]:
            ranks = [
                build(6 // world_size, rank, world_size, num_workers=workers) for rank in range(world_size)
            ]
            if state is not None:
                for rank in ranks:
                    rank.restore(state)
            passes = [rank.iterate(inside_epoch=True) if state else rank.iterate() for rank in ranks]
            taken = [[batch for (batch,) in itertools.islice(one, steps)] for one in passes]
            epochs[-1] += merged([torch.cat(batches).tolist() for batches in taken if batches])
            state = ranks[0].state()
            if steps == 99:
                following = [indices(rank.iterate()) for rank in ranks]
                epochs.append(merged(following))
        return epochs

    reference = sampler()
    assert in_own_process(job) == [list(reference), list(reference)]


def test_a_changed_world_size_between_two_epochs() -> None:
    reference = sampler()
    whole = [list(reference) for _ in range(2)]
    one = build(4, 0, 1)
    assert indices(one.iterate()) == whole[0]
    state = one.state()
    ranks = [build(2, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.restore(state)

    assert merged([indices(rank.iterate()) for rank in ranks]) == whole[1]


def test_the_same_world_goes_on_after_every_batch_and_at_the_end() -> None:
    reference = sampler()
    whole = [list(reference) for _ in range(3)]
    for stop in range(9):
        one = build(4, 0, 1)
        list(one.iterate())
        seen = indices(itertools.islice(batches := one.iterate(), stop))
        state = one.state()
        other = build(4, 0, 1)
        other.restore(state)
        assert seen + indices(other.iterate(inside_epoch=True)) == whole[1]
        assert indices(other.iterate()) == whole[2]
        del batches


def test_an_epoch_that_the_script_sets_wins_between_two_epochs() -> None:
    one = build(4, 0, 1)
    list(one.iterate())
    other = build(4, 0, 1)
    other._loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
    other.restore(one.state())
    expected = sampler()
    expected.set_epoch(7)

    assert indices(other.iterate()) == list(expected)


def test_a_batch_sampler_over_it_goes_on_too() -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(DataLoader(DATA, batch_sampler=BatchSampler(sampler(), 4, drop_last=False)))

    one, other = loader(), loader()
    seen = indices(itertools.islice(batches := one.iterate(), 3))
    other.restore(one.state())
    del batches

    assert seen + indices(other.iterate(inside_epoch=True)) == list(sampler())


def test_another_seed_is_refused_inside_an_epoch() -> None:
    one = build(4, 0, 1)
    batches = one.iterate()
    next(batches)

    with pytest.raises(StateMismatchError, match=r"sampler\.seed: checkpoint has 3, found 5"):
        build(4, 0, 1, seed=5).restore(one.state())


@pytest.mark.parametrize(
    ("workers", "is_part"),
    [
        pytest.param(0, False, id="by run.batches alone", marks=pytest.mark.chaos),
        pytest.param(2, True, id="as a part as well, 2 workers", marks=pytest.mark.chaos),
        pytest.param(2, False, id="by run.batches alone, 2 workers", marks=pytest.mark.chaos),
        pytest.param(0, True, id="as a part as well"),
    ],
)
def test_runs_that_are_cut_off_in_any_epoch_train_on_every_sample_once(
    tmp_path: Path, workers: int, is_part: bool
) -> None:
    def attempt(directory: Path, stop: int, seen: dict[int, list[int]]) -> None:
        order = sampler()
        loader = DataLoader(DATA, 4, sampler=order, num_workers=workers)
        parts = {"order": order} if is_part else {}
        saves = [unbroken.EverySteps(1)]
        with contextlib.suppress(CutOffError), unbroken.Run(directory, save=saves, **parts) as run:
            for _ in run.epochs(3):
                for (batch,) in run.batches(loader):
                    run.step()
                    seen[run.step_count] = batch.tolist()
                    if run.step_count == stop:
                        raise CutOffError

    def job() -> list[int]:
        seen: dict[int, list[int]] = {}
        for stop in (3, 7, 8, 9, 10, 16, 20, 99):
            attempt(tmp_path, stop, seen)
        return [index for step in sorted(seen) for index in seen[step]]

    reference = sampler()
    assert in_own_process(job) == [index for _ in range(3) for index in reference]


def test_the_place_among_the_ranks_is_that_of_torchrun_and_is_checked() -> None:
    code = (
        "import unbroken; sampler = unbroken.ElasticSampler(range(9)); "
        "print(sampler.rank, sampler.world_size)"
    )
    environment = {**os.environ, "RANK": "2", "WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )

    assert done.stdout.split() == ["2", "4"]
    with pytest.raises(UsageError, match="rank from 0 to 1, found 2"):
        sampler(2, 2)
    with pytest.raises(UsageError, match="rank=1, world_size=None"):
        unbroken.ElasticSampler(DATA, rank=1)
