"""Runs with keyed randomness: whatever changes at a resume, every sample is the one it would have been."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import unbroken
from tests.training.data_runs import seed
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError

from ..some import named, some

SAMPLES = 11
Seen = list[tuple[int, bytes]]


class Augmented(Dataset[Any]):
    """Draws from the global generators and from one of its own."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.rng = np.random.default_rng(9)
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.reads += 1
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), self.rng.normal()]
        return index, torch.tensor(drawn, dtype=torch.float64)


def build(size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), size, **{"shuffle": "sampler" not in options, **options})


def samples(batch: Any) -> Seen:
    return [(int(index), drawn.numpy().tobytes()) for index, drawn in zip(*batch, strict=True)]


def train(
    directory: Path,
    make: Callable[[], DataLoader[Any]],
    *,
    stop: int | None = None,
    epochs: int = 3,
    is_rebuilt: bool = False,
    randomness: Any = "keyed",
    **options: Any,
) -> Seen:
    """Return the samples of an attempt, which is cut off in the batch after `stop` of its own."""
    loader, seen, batches = make(), Seen(), 0
    save = [unbroken.EverySteps(stop or 1000)]
    try:
        with unbroken.Run(directory, **{"save": save, "background": False, **options}) as run:
            for _ in run.epochs(epochs):
                loader = make() if is_rebuilt else loader
                for batch in run.batches(loader, randomness=randomness):
                    if batches == stop:
                        raise InterruptedError
                    seen += samples(batch)
                    batches += 1
                    random.random(), torch.rand(())
                    run.step()
    except InterruptedError:
        pass
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What three epochs give that nothing disturbs."""
    seed(0)
    return train(tmp_path_factory.mktemp("whole") / "run", build)


def test_workers_and_batches_change_at_every_resume_and_no_sample_does(tmp_path: Path, whole: Seen) -> None:
    two = {"num_workers": 2, "persistent_workers": True}
    attempts = [({}, 3), ({"size": 3, **two}, 4), ({"size": 4, "num_workers": 2}, 1), ({"size": 11}, None)]
    every = [unbroken.EverySteps(1)]
    seen = Seen()
    for number, (options, stop) in enumerate(attempts):
        seed(number)
        seen += train(tmp_path, lambda options=options: build(**options), stop=stop, save=every)  # type: ignore[misc]

    assert seen == whole
    epochs = [whole[start : start + SAMPLES] for start in range(0, len(whole), SAMPLES)]
    assert all(sorted(index for index, _ in epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len(set(whole)) == len(whole)
    assert len({tuple(index for index, _ in epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["built once", "built anew in each epoch"])
@pytest.mark.parametrize("stop", [1, 5, 6, 7])
def test_a_run_goes_on_wherever_it_was_cut_off(
    tmp_path: Path, whole: Seen, stop: int, is_rebuilt: bool
) -> None:
    seed(0)
    seen = train(tmp_path, build, stop=stop, is_rebuilt=is_rebuilt)
    seed(5)

    assert seen + train(tmp_path, build, is_rebuilt=is_rebuilt) == whole


def test_a_checkpoint_of_the_end_of_an_epoch_begins_the_next_one(tmp_path: Path, whole: Seen) -> None:
    seen = Seen()
    for epochs in (1, 2, 3):
        seed(epochs - 1)
        seen += train(tmp_path, build, epochs=epochs)

    assert seen == whole


def test_going_back_to_an_earlier_checkpoint_gives_the_same_samples_again(
    tmp_path: Path, whole: Seen
) -> None:
    seed(0)
    train(tmp_path, build, save=[unbroken.EverySteps(8)], keep=[unbroken.KeepLast(9)])
    seed(1)

    assert train(tmp_path, build, resume="step-00000008") == whole[SAMPLES + 4 :]


def test_ranks_share_the_rest_of_the_epoch_of_one_rank(tmp_path: Path) -> None:
    def of_rank(rank: int, world_size: int) -> Callable[[], DataLoader[Any]]:
        sampler = unbroken.ElasticSampler(Augmented(), seed=7, rank=rank, world_size=world_size)
        return lambda: build(4 // world_size, sampler=sampler)

    expected = train(tmp_path / "whole", of_rank(0, 1), epochs=2)
    seen = train(tmp_path / "one", of_rank(0, 1), epochs=2, stop=1)
    shares = []
    for rank in range(2):
        shutil.copytree(tmp_path / "one", tmp_path / f"rank{rank}")
        seed(rank)
        shares.append(train(tmp_path / f"rank{rank}", of_rank(rank, 2), epochs=2))

    rest = [*zip(shares[0][:4], shares[1], strict=False)]
    assert seen + [sample for pair in rest for sample in pair][:7] == expected[:SAMPLES]
    assert sorted(shares[0][4:] + shares[1][3:]) == sorted(expected[SAMPLES:])


@pytest.mark.parametrize(
    ("before", "epochs"),
    some(named(["keyed", "capture"]), {"between epochs": 1, "inside one": 3}, one_in=2),
)
def test_the_other_randomness_than_in_the_checkpoint_is_refused_before_a_sample_is_read(
    tmp_path: Path, before: str, epochs: int
) -> None:
    after = "capture" if before == "keyed" else "keyed"
    stop = None if epochs == 1 else 2
    train(tmp_path, build, randomness=before, epochs=epochs, stop=stop)
    loader = build()

    with pytest.raises(StateMismatchError, match=f"expected randomness='{before}'.*found '{after}'"):
        train(tmp_path, lambda: loader, randomness=after)

    assert loader.dataset.reads == 0  # type: ignore[attr-defined]
    assert train(tmp_path, build, randomness=before)


def test_one_loader_has_one_randomness_in_a_run(tmp_path: Path) -> None:
    loader = build()
    with unbroken.Run(tmp_path) as run:
        next(iter(run.batches(loader, randomness="keyed")))
        with pytest.raises(StateMismatchError, match="expected randomness='keyed'"):
            next(iter(run.batches(loader)))
        with pytest.raises(UsageError, match="found 'random'"):
            iter(run.batches(build(), randomness="random"))  # type: ignore[arg-type]


def test_the_seed_is_that_of_torch_and_asking_for_it_draws_nothing(tmp_path: Path, whole: Seen) -> None:
    def first(name: str, *, torch_seed: int, generator: Any = None) -> Any:
        seed(torch_seed)
        before = torch.get_rng_state()
        with unbroken.Run(tmp_path / name) as run:
            batch = next(iter(run.batches(build(generator=generator), randomness="keyed")))
        assert torch.equal(torch.get_rng_state(), before)
        return samples(batch)

    assert first("same", torch_seed=0) == whole[:2]
    assert first("other", torch_seed=1) != whole[:2]
    assert first("own", torch_seed=1, generator=torch.Generator().manual_seed(0)) == whole[:2]


def test_two_loaders_are_told_apart_by_their_names_in_any_order(tmp_path: Path) -> None:
    def play(directory: Path, orders: list[tuple[str, ...]]) -> dict[str, Seen]:
        loaders = {name: build() for name in ("a", "b")}
        seen: dict[str, Seen] = {"a": [], "b": []}
        with unbroken.Run(directory) as run:
            for epoch in run.epochs(run._position.epoch + len(orders)):
                for name in orders[epoch % len(orders)]:
                    for batch in run.batches(loaders[name], name=name, randomness="keyed"):
                        seen[name] += samples(batch)
        return seen

    seed(0)
    expected = play(tmp_path / "whole", [("a", "b"), ("a", "b")])
    seed(0)
    first = play(tmp_path / "cut", [("a", "b")])
    seed(3)
    second = play(tmp_path / "cut", [("b", "a")])

    assert {name: first[name] + second[name] for name in first} == expected
    assert not set(expected["a"]) & set(expected["b"])


def test_a_second_loader_without_a_name_is_refused_at_the_start(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path) as run:
        for _ in run.epochs(1):
            list(run.batches(build(), randomness="keyed"))
            with pytest.raises(UnsupportedStateError, match="second one of the same name"):
                iter(run.batches(build(), randomness="keyed"))


def test_an_evaluation_in_the_middle_of_an_epoch_leaves_the_samples_as_they_are(
    tmp_path: Path, whole: Seen
) -> None:
    train_loader, evaluation, seen = build(), build(4), Seen()
    seed(0)
    with unbroken.Run(tmp_path) as run:
        for _ in run.epochs(3):
            for batch in run.batches(train_loader, randomness="keyed"):
                seen += samples(batch)
                evaluated = [*run.batches(evaluation, name="evaluation", randomness="keyed")]
                assert len(evaluated) == 3
                run.step()

    assert seen == whole


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        ([1, 2], "found a list"),
        (DataLoader(Stream()), "found the stream Stream"),
        (build(sampler=WeightedRandomSampler([1.0] * SAMPLES, 5)), "found WeightedRandomSampler"),
        (build(batch_sampler=[[1], [2]], size=1, shuffle=False), "found list"),
        (build(None, shuffle=False), "batch_size=None"),  # type: ignore[arg-type]
        (build(num_workers=1, in_order=False), "in_order=False"),
    ],
    ids=["a list", "a stream", "a weighted order", "own batches", "no batches", "no order"],
)
def test_what_cannot_be_keyed_is_refused_at_the_start(tmp_path: Path, loader: Any, found: str) -> None:
    with unbroken.Run(tmp_path) as run, pytest.raises(UnsupportedStateError, match=found) as refused:
        iter(run.batches(loader, randomness="keyed"))

    assert "randomness='keyed'" in (refused.value.hint or "")


def test_a_loader_that_keeps_its_own_position_is_refused(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(TensorDataset(torch.arange(4)))
    with unbroken.Run(tmp_path) as run, pytest.raises(UnsupportedStateError, match="StatefulDataLoader"):
        iter(run.batches(loader, randomness="keyed"))


def test_other_data_are_refused_inside_an_epoch_and_told_between_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def more() -> DataLoader[Any]:
        return DataLoader(Augmented(12), 2, shuffle=True)

    train(tmp_path, build, stop=2)
    with pytest.raises(StateMismatchError, match="dataset_length: checkpoint has 11, found 12"):
        train(tmp_path, more)
    train(tmp_path, build, epochs=1)

    assert len(train(tmp_path, more, epochs=2)) == 12
    assert "dataset_length: checkpoint has 11, found 12: the next epoch begins with it" in (
        capsys.readouterr().err
    )


def test_batches_of_another_size_do_not_bring_back_what_the_old_ones_had_dropped(tmp_path: Path) -> None:
    seen = train(tmp_path, lambda: build(4, drop_last=True), epochs=1, stop=None)
    assert len(seen) == 8
    first = train(tmp_path / "cut", lambda: build(4, drop_last=True), stop=2)
    rest = train(tmp_path / "cut", lambda: build(1, drop_last=True), epochs=2)

    assert (len(first), len(rest)) == (8, SAMPLES)


@pytest.mark.parametrize("randomness", ["keyed", "capture"])
def test_workers_that_live_on_end_with_the_run(tmp_path: Path, randomness: str) -> None:
    def make() -> DataLoader[Any]:
        return build(num_workers=1, persistent_workers=True)

    train(tmp_path, make, stop=2, randomness=randomness)

    assert not multiprocessing.active_children()
