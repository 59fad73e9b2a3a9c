"""Several loaders in one run: which one of the checkpoint is which, and what each of them keeps."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import unbroken
from tests.some import named, some
from tests.training.test_position import Log, Loop, check_every_cut, loader, play, values
from unbroken.errors import UnsupportedStateError


def test_loaders_that_cannot_be_told_apart_have_to_be_named(tmp_path: Path) -> None:
    def loops(directory: Path, names: tuple[str | None, ...], order: tuple[int, ...]) -> list[Any]:
        seen = []
        loaders = [loader(generator=torch.Generator().manual_seed(number)) for number in range(2)]
        with unbroken.Run(directory) as run:
            for _ in run.epochs(run._position.epoch + 1):
                for index in order:
                    for batch in run.batches(loaders[index], name=names[index]):
                        seen.append(values(batch))
                        run.step()
        return seen

    loops(tmp_path / "unnamed", (None, None), (0, 1))
    with pytest.raises(UnsupportedStateError, match="cannot tell which of 2 loaders"):
        loops(tmp_path / "unnamed", (None, None), (1, 0))
    first = loops(tmp_path / "named", ("a", "b"), (0, 1))
    second = loops(tmp_path / "named", ("a", "b"), (1, 0))
    whole = []
    loaders = [loader(generator=torch.Generator().manual_seed(number)) for number in range(2)]
    for order in ((0, 1), (1, 0)):
        for index in order:
            whole += [values(batch) for batch in loaders[index]]
    assert first + second == whole


class Counting(Sampler[int]):
    """Counts its epochs itself, in an attribute that its order depends on."""

    def __init__(self, count: int = 8) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


def elastic(count: int = 8) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(count))
    return DataLoader(data, batch_size=2, sampler=unbroken.ElasticSampler(data, seed=3))


def counting(count: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, sampler=Counting(count))


def warm_up_and_train(
    build: Callable[..., DataLoader[Any]], count: int, names: tuple[str | None, str | None]
) -> Loop:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        warm_up, train = build(count), build()
        for epoch in run.epochs(3):
            if epoch == 0:
                for batch in run.batches(warm_up, name=names[0]):
                    step(run, values(batch))
            for batch in run.batches(train, name=names[1]):
                step(run, values(batch))

    return loop


KINDS_AND_PLACES = some(
    {kind: kind for kind in ("elastic", "generator")},
    {place: place for place in ("before the loop", "in its body")},
    one_in=2,
)


@pytest.mark.parametrize("build", [elastic, pytest.param(counting, marks=pytest.mark.chaos)])
def test_loaders_of_one_data_set_that_keep_an_epoch_have_to_be_named(tmp_path: Path, build: Any) -> None:
    def until(names: tuple[str | None, str | None], directory: str, cut: int | None) -> Log:
        loop = warm_up_and_train(build, 8, names)
        return play(tmp_path / directory, loop, cut, save=[unbroken.EveryEpochs(1)])

    names = ("warm-up", "train")
    until((None, None), "unnamed", 13)
    with pytest.raises(UnsupportedStateError, match="cannot tell which of 2 loaders"):
        until((None, None), "unnamed", None)
    whole = until(names, "named", 13)
    assert [order for _, order, _ in until(names, "named", None)] == [
        values(batch) for batch in _third_pass(build())
    ]
    assert len(whole) == 13


def _third_pass(data: DataLoader[Any]) -> list[Any]:
    return [list(data) for _ in range(3)][2]


@pytest.mark.parametrize("build", [counting, pytest.param(elastic, marks=pytest.mark.chaos)])
def test_loaders_that_keep_an_epoch_are_told_apart_by_their_data(tmp_path: Path, build: Any) -> None:
    loop = warm_up_and_train(build, 4, (None, None))

    check_every_cut(tmp_path, loop, cuts=[7, 11], save=[unbroken.EveryEpochs(1)])


@pytest.mark.parametrize("build", [elastic, pytest.param(counting, marks=pytest.mark.chaos)])
def test_an_evaluation_whose_sampler_keeps_an_epoch_goes_on_with_it(tmp_path: Path, build: Any) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, evaluation = loader(), build(4)
        for _ in run.epochs(2):
            for batch in run.batches(train):
                step(run, values(batch), [values(item) for item in run.batches(evaluation)])

    check_every_cut(tmp_path, loop, cuts=[4, 7], save=[unbroken.EverySteps(3)])


def test_names_that_come_with_a_resume_are_given_to_the_loaders_that_look_the_same(tmp_path: Path) -> None:
    def until(names: tuple[str | None, str | None], directory: str, cut: int | None) -> Log:
        loop = warm_up_and_train(elastic, 4, names)
        return play(tmp_path / directory, loop, cut, save=[unbroken.EveryEpochs(1)])

    torch.manual_seed(1)
    whole = until((None, None), "whole", None)
    torch.manual_seed(1)
    until((None, None), "cut", 11)

    assert until(("warm-up", "train"), "cut", None) == whole[10:]


def test_that_loaders_cannot_be_told_apart_is_said_when_the_second_one_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for names, lines in ((None, None), 1), (("warm-up", "train"), 0):
        play(tmp_path / str(lines), warm_up_and_train(elastic, 8, names), 6)
        told = [line for line in capsys.readouterr().err.splitlines() if "name them" in line]
        assert len(told) == lines


def with_generator(kind: str) -> DataLoader[Any]:
    if kind == "elastic":
        return elastic()
    return loader(generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("kind", "place"), KINDS_AND_PLACES)
def test_a_loader_begins_each_epoch_as_it_would_have_wherever_it_is_built(
    tmp_path: Path, kind: str, place: str
) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = with_generator(kind)
        for _ in run.epochs(3):
            if place == "in its body":
                train = with_generator(kind)
            for batch in run.batches(train):
                step(run, values(batch))

    check_every_cut(tmp_path, loop, cuts=[5, 9], save=[unbroken.EveryEpochs(1)])


def test_a_loader_that_a_resume_finds_in_the_body_of_the_second_epoch_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = None
        for _ in run.epochs(4):
            train = train or with_generator("generator")
            for batch in run.batches(train):
                step(run, values(batch))

    def told() -> int:
        return capsys.readouterr().err.count("built anew in each")

    save = [unbroken.EveryEpochs(1)]
    play(tmp_path, loop, 5, save=save)
    assert told() == 0
    play(tmp_path, loop, 9, save=save)
    assert told() == 1
    # By now it was seen to be kept.
    play(tmp_path, loop, None, save=save)
    assert told() == 0


@pytest.mark.parametrize(("kind", "place"), KINDS_AND_PLACES)
def test_an_evaluation_inside_an_epoch_goes_on_wherever_its_loader_is_built(
    tmp_path: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, evaluation = loader(), with_generator(kind)
        for _ in run.epochs(2):
            if place == "in its body":
                evaluation = with_generator(kind)
            for batch in run.batches(train):
                step(run, values(batch), [values(item) for item in run.batches(evaluation)][:1])

    check_every_cut(tmp_path, loop, cuts=[3, 7], save=[unbroken.EverySteps(2)])
    # The body may build it once, or for each evaluation: which one is not to be seen.
    assert ("for each evaluation" in capsys.readouterr().err) == (place == "in its body")


def test_an_evaluation_goes_on_where_there_is_no_loop_over_epochs(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, evaluation = loader(), with_generator("generator")
        for batch in run.batches(DataLoader(range(6))):
            step(run, batch.tolist(), [values(item) for item in run.batches(evaluation)][:1])
        assert train

    check_every_cut(tmp_path, loop, cuts=[3])


def test_loaders_are_told_apart_by_their_data_when_their_workers_have_changed(tmp_path: Path) -> None:
    def build(workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        generators = [torch.Generator().manual_seed(number) for number in range(2)]
        other = DataLoader(TensorDataset(torch.arange(3)), generator=generators[0])
        return other, loader(generator=generators[1], num_workers=workers)

    seen = []
    for epochs, workers in ((1, 0), (2, 1)):
        first, second = build(workers)
        with unbroken.Run(tmp_path) as run:
            for epoch in run.epochs(epochs):
                order = (first, second) if epoch == 0 else (second, first)
                seen += [[values(batch) for batch in run.batches(data)] for data in order]

    plain = build(0)[1]
    assert [seen[1], seen[2]] == [[values(batch) for batch in plain] for _ in range(2)]


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, which lives as long as it does."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int]:
        return (index * 1000 + self.rng.randrange(1000),)


class Progress:
    """Shows how far a loop is, as tqdm does."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Stream:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.rng.randrange(1000)] for _ in range(4)])


def wrappers() -> dict[str, Callable[[], Any]]:
    """Return, by name, what builds a loader anew around things that are made here and live on."""
    data, numbers, stream, generator = Drawing(), TensorDataset(torch.arange(8)), Stream(), torch.Generator()
    sampler = unbroken.ElasticSampler(numbers, seed=3)

    def both() -> DataLoader[Any]:
        return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))

    return {
        "progress": lambda: Progress(stream),
        "dataset": lambda: DataLoader(data, 2, shuffle=True),
        "a new generator, too": both,
        "generator": lambda: DataLoader(numbers, 2, shuffle=True, generator=generator),
        "progress over a loader": lambda: Progress(DataLoader(data, 2)),
        "sampler": lambda: DataLoader(numbers, 2, sampler=sampler),
        "workers": lambda: DataLoader(data, 2, num_workers=1, persistent_workers=True),
    }


@pytest.mark.parametrize("kind", some(named(wrappers()), one_in=2))
def test_what_outlives_the_loader_that_is_built_around_it_goes_on(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        build = wrappers()[kind]
        for _ in run.epochs(4):
            for batch in run.batches(build()):
                step(run, values(batch))

    check_every_cut(tmp_path, loop, cuts=[5, 13], save=[unbroken.EveryEpochs(1)])
    # What a loader brings itself begins anew, as far as anybody can know after one epoch.
    is_told = "built anew in each" in capsys.readouterr().err
    assert is_told == (kind in ("a new generator, too", "workers"))


def test_a_number_that_a_resume_cannot_bring_back_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        data, sampler = TensorDataset(torch.arange(8)), Counting()
        for _ in run.epochs(3):
            for batch in run.batches(DataLoader(data, 2, sampler=sampler)):
                step(run, values(batch))

    play(tmp_path, loop, None)
    assert capsys.readouterr().err.count("would not bring back sampler.epoch") == 1


@pytest.mark.parametrize("kind", some(named(["slots", "slots in the body", "frozen"]), one_in=2))
def test_a_loader_that_no_inventory_lists_goes_on(tmp_path: Path, kind: str) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = with_generator("generator") if kind == "frozen" else Stream()
        if kind == "frozen":
            gc.freeze()
        for _ in run.epochs(3):
            train = Stream() if kind == "slots in the body" else train
            for batch in run.batches(train):
                step(run, values(batch))

    try:
        check_every_cut(tmp_path, loop, cuts=[5, 9], save=[unbroken.EveryEpochs(1)])
    finally:
        gc.unfreeze()


@pytest.mark.chaos
def test_evaluations_that_build_workers_anew_do_not_pile_up(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, data = loader(), TensorDataset(torch.arange(4))
        for _ in run.epochs(2):
            for batch in run.batches(train):
                evaluation = DataLoader(data, 2, shuffle=True, num_workers=1, persistent_workers=True)
                step(run, values(batch), [values(item) for item in run.batches(evaluation)])
                assert len(run._position.state()) <= 2
                assert len(multiprocessing.active_children()) <= 2

    check_every_cut(tmp_path, loop, cuts=[3, 5])
    assert not multiprocessing.active_children()


def test_two_evaluations_whose_workers_live_on_keep_them(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(4))
    both = [DataLoader(data, 2, num_workers=1, persistent_workers=True) for _ in range(2)]
    with unbroken.Run(tmp_path) as run:
        workers = []
        for _ in run.batches([1, 2, 3]):
            for evaluation in both:
                assert len([*run.batches(evaluation)]) == 2
            workers.append({child.pid for child in multiprocessing.active_children()})
    assert len(workers[0]) == 2
    assert workers == [workers[0]] * 3
