"""Loops of every shape go on where they were, or are refused: each is cut everywhere and continued."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

Log = list[tuple[Any, ...]]
Loop = Callable[[unbroken.Run, Log, Callable[..., None]], None]

# One of the two in the ordinary tests.
STEPS_OR_EPOCHS = [
    pytest.param([unbroken.EverySteps(1)], id="steps"),
    pytest.param([unbroken.EveryEpochs(1)], id="epochs", marks=pytest.mark.chaos),
]
EPOCHS_OR_STEPS = [
    pytest.param([unbroken.EveryEpochs(1)], id="epochs"),
    pytest.param([unbroken.EverySteps(1)], id="steps", marks=pytest.mark.chaos),
]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8)), **{"batch_size": 2, "shuffle": True, **options})


class CutOffError(Exception):
    pass


def play(directory: Path, loop: Loop, cut: int | None, **options: Any) -> Log:
    """Run `loop` and return what it logged, up to the step after which it is cut off."""
    log: Log = []
    options.setdefault("save", [unbroken.EverySteps(1)])
    generators = {"own": np.random.default_rng(5)} if options.pop("own", False) else {}

    def step(run: unbroken.Run, *seen: Any) -> None:
        drawn = float(torch.rand(()))
        run.step()
        log.append((run.step_count, *seen, drawn))
        if run.step_count == cut:
            raise CutOffError

    try:
        counters: dict[str, Any] = {}
        with unbroken.Run(directory, counters=counters, **generators, **options) as run:
            run.generators, run.counters = generators, counters  # type: ignore[attr-defined]
            loop(run, log, step)
    except CutOffError:
        pass
    return log


def check_every_cut(tmp_path: Path, loop: Loop, *, cuts: Sequence[int] = (), **options: Any) -> None:
    """A run that is cut after any step, and continued by other seeds, logs what the whole one does."""

    def seed(value: int) -> None:
        torch.manual_seed(value)
        np.random.seed(value)
        random.seed(value)

    seed(1)
    whole = play(tmp_path / "whole", loop, None, **dict(options))
    assert len(whole) > 4
    for cut in cuts or range(1, len(whole)):
        directory = tmp_path / f"cut{cut}"
        seed(1)
        play(directory, loop, cut, **dict(options))
        # Begun anew if it was cut before its first checkpoint, and then with the same seeds.
        seed(1000 + cut if any(directory.glob("checkpoints/step-*")) else 1)
        rest = play(directory, loop, None, **dict(options))
        assert rest, f"cut {cut}: nothing was left to do"
        start = rest[0][0] - 1
        assert rest == whole[start:], f"cut after step {cut}"


def values(batch: Any) -> list[int]:
    return [int(value) for value in torch.as_tensor(batch[0]).flatten()]


def test_an_evaluation_by_run_batches_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, evaluation = loader(), loader()
        for _ in run.epochs(2):
            for batch in run.batches(train):
                seen = sum(1 for _ in run.batches(evaluation)) if run.step_count % 3 == 2 else None
                step(run, values(batch), seen)

    check_every_cut(tmp_path, loop)


def test_what_stands_after_the_step_in_the_body_of_the_loop_is_done_once(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train, evaluation = loader(), DataLoader(TensorDataset(torch.arange(4)), batch_size=2, shuffle=True)
        counters = run.counters  # type: ignore[attr-defined]
        for _ in run.epochs(2):
            for batch in run.batches(train):
                step(run, values(batch), counters.get("after"))
                if run.step_count % 2 == 0:
                    counters["after"] = [values(item) for item in run.batches(evaluation)]

    check_every_cut(tmp_path, loop)


def test_several_steps_for_one_batch_are_not_torn_apart(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = loader()
        for _ in run.epochs(2):
            for batch in run.batches(train):
                step(run, "first", values(batch))
                step(run, "second", values(batch))

    check_every_cut(tmp_path, loop)


def test_a_loader_that_only_some_epochs_use(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        warm_up, train = loader(), loader()
        for epoch in run.epochs(3):
            if epoch == 0:
                for batch in run.batches(warm_up):
                    step(run, "warm-up", values(batch))
            for batch in run.batches(train):
                step(run, "train", values(batch))

    check_every_cut(tmp_path, loop)


def test_two_phases_of_epochs(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = loader()
        for count in (2, 4):
            for epoch in run.epochs(count):
                for batch in run.batches(train):
                    step(run, count, epoch, values(batch))

    check_every_cut(tmp_path, loop)


@pytest.mark.parametrize("save", STEPS_OR_EPOCHS)
def test_work_before_the_batches_of_an_epoch_counts_once(tmp_path: Path, save: list[Any]) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        own = run.generators["own"]  # type: ignore[attr-defined]
        train = loader()
        for _ in run.epochs(3):
            own.random()
            for batch in run.batches(train):
                step(run, values(batch), float(own.random()))

    check_every_cut(tmp_path, loop, own=True, save=save)


@pytest.mark.parametrize("save", EPOCHS_OR_STEPS)
def test_a_generator_that_is_a_part_and_drawn_from_by_the_dataset_too(
    tmp_path: Path, save: list[Any]
) -> None:
    class Drawing(Dataset[Any]):
        def __init__(self, generator: Any) -> None:
            self.generator = generator

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return index, float(self.generator.random())

    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        own = run.generators["own"]  # type: ignore[attr-defined]
        train = DataLoader(Drawing(own), batch_size=2, shuffle=True)
        for _ in run.epochs(3):
            own.random()
            for indices, drawn in run.batches(train):
                step(run, indices.tolist(), drawn.tolist(), float(own.random()))

    check_every_cut(tmp_path, loop, own=True, save=save)


@pytest.mark.parametrize("save", STEPS_OR_EPOCHS)
def test_a_loader_that_is_built_anew_each_epoch(tmp_path: Path, save: list[Any]) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        for _ in run.epochs(3):
            for batch in run.batches(loader()):
                step(run, values(batch))

    check_every_cut(tmp_path, loop, save=save)


@pytest.mark.parametrize(
    ("kind", "save"),
    [
        pytest.param("own", [unbroken.EverySteps(1)], id="own-steps", marks=pytest.mark.chaos),
        pytest.param("global", [unbroken.EveryEpochs(1)], id="global-epochs"),
        pytest.param("own", [unbroken.EveryEpochs(1)], id="own-epochs", marks=pytest.mark.chaos),
        pytest.param("global", [unbroken.EverySteps(1)], id="global-steps", marks=pytest.mark.chaos),
    ],
)
def test_an_iterable_that_shuffles_itself_as_it_begins(tmp_path: Path, kind: str, save: list[Any]) -> None:
    class Shuffling:
        def __init__(self) -> None:
            self.generator: Any = random if kind == "global" else random.Random(3)

        def __iter__(self) -> Iterator[list[int]]:
            items = [[value] for value in range(5)]
            self.generator.shuffle(items)
            return iter(items)

    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        items = Shuffling()
        for _ in run.epochs(3):
            for batch in run.batches(items):
                step(run, batch)

    check_every_cut(tmp_path, loop, save=save)


def test_a_step_in_a_nested_loop_is_refused_for_nothing_leads_back_into_it(tmp_path: Path) -> None:
    outer, inner = loader(), loader()
    with unbroken.Run(tmp_path) as run, pytest.raises(UnsupportedStateError, match="nested in another"):
        for _ in run.batches(outer):
            for _ in run.batches(inner):
                run.step()


def test_a_loop_that_goes_on_over_the_border_of_an_epoch_is_refused(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path) as run:
        source = iter(run.batches(loader()))
        next(source)
        for _ in run.epochs(1):
            with pytest.raises(UnsupportedStateError, match="began in an earlier epoch"):
                next(source)


def test_an_iterator_that_each_epoch_takes_a_few_batches_of(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        train = loader()
        for _ in run.epochs(3):
            source = iter(run.batches(train))
            for _ in range(3):
                if (batch := next(source, None)) is not None:
                    step(run, values(batch))

    check_every_cut(tmp_path, loop, save=[unbroken.EveryEpochs(1)])


def test_a_loop_that_lost_a_pass_is_refused(tmp_path: Path) -> None:
    def loops(directory: Path, count: int, cut: int | None) -> None:
        try:
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                for _ in run.epochs(1):
                    for _ in range(count):
                        for _ in run.batches([1, 2]):
                            run.step()
                            if run.step_count == cut:
                                raise CutOffError
                    run.step()
        except CutOffError:
            pass

    loops(tmp_path, 2, 4)
    with pytest.raises(StateMismatchError, match=r"expected 1 more loops over run\.batches"):
        loops(tmp_path, 1, None)


def test_data_may_grow_between_two_epochs(tmp_path: Path) -> None:
    for count in (1, 2):
        with unbroken.Run(tmp_path) as run:
            for epoch in run.epochs(count):
                data = DataLoader(TensorDataset(torch.arange(4 * (epoch + 1))), batch_size=2, shuffle=True)
                for _ in run.batches(data):
                    run.step()
    assert run.step_count == 6


class Read(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("data", "randomness", "saved", "here"),
    [
        (loader, "capture", 2, 1),
        (loader, "capture", 1, 2),
        (loader, "keyed", 2, 1),
        (lambda: DataLoader(Read(), batch_size=2), "capture", 2, 1),
        (lambda: [[index] for index in range(4)], "capture", 2, 1),
    ],
    ids=["a map, fewer", "a map, more", "a keyed map", "a stream", "a list"],
)
def test_a_run_goes_on_inside_an_epoch_with_another_number_of_devices_if_that_is_allowed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: Callable[[], Any],
    randomness: Any,
    saved: int,
    here: int,
) -> None:
    devices: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a stand-in")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(devices))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, place: devices.__setitem__(place, state))

    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        source = data()
        for _ in run.epochs(2):
            for batch in run.batches(source, randomness=randomness):
                # As training does on each device.
                devices[:] = [device + 1 for device in devices]
                step(run, torch.as_tensor(batch[0]).tolist())

    devices[:] = [torch.zeros(16, dtype=torch.uint8)] * 2
    torch.manual_seed(1)
    whole = play(tmp_path / "whole", loop, None, save=[unbroken.EverySteps(2)])
    torch.manual_seed(1)
    devices[:] = [torch.zeros(16, dtype=torch.uint8)] * saved
    play(tmp_path / "cut", loop, 3, save=[unbroken.EverySteps(2)])
    devices[:] = [torch.zeros(16, dtype=torch.uint8)] * here

    with pytest.raises(StateMismatchError, match=f"has {saved} CUDA devices, there are {here}"):
        play(tmp_path / "cut", loop, None)
    rest = play(tmp_path / "cut", loop, None, allow=["rng.cuda"])

    assert rest == whole[2:]
    # A device that the checkpoint knows goes on where it was, another one where it is.
    assert [int(device[0]) for device in devices] == ([8] if here == 1 else [8, 6])


@pytest.mark.parametrize("has_epochs", [True, False], ids=["epochs", "no epochs"])
def test_random_numbers_of_the_script_after_entering_are_told_once_and_put_back(
    tmp_path: Path, has_epochs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(after_entering: Callable[[], object], cut: int | None) -> tuple[Log, list[str]]:
        def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
            train = loader()
            after_entering()
            for _ in run.epochs(2) if has_epochs else [0]:
                for batch in run.batches(train):
                    step(run, values(batch), random.random())

        log = play(tmp_path, loop, cut)
        return log, [line for line in capsys.readouterr().err.splitlines() if "put back" in line]

    told = (
        "unbroken: since the run was entered the script has seeded, or drawn from, the random generators of "
        "{}: they are put back to where the checkpoint has them"
    )
    torch.manual_seed(1)
    random.seed(1)
    # One that begins puts nothing back.
    assert attempt(lambda: random.seed(3), 2)[1] == []
    assert attempt(lambda: random.seed(4), 2)[1] == [told.format("python")]
    random.seed(5)
    assert attempt(lambda: None, 3)[1] == []
    assert attempt(lambda: (torch.rand(()), np.random.rand()), 4)[1] == [told.format("numpy, torch")]


def test_arrays_are_loaders_too_and_told_apart(tmp_path: Path) -> None:
    def loop(run: unbroken.Run, log: Log, step: Callable[..., None]) -> None:
        arrays = np.arange(3).reshape(3, 1), np.arange(5, 8).reshape(3, 1)
        for _ in run.epochs(2):
            for array in arrays:
                for row in run.batches(array):
                    step(run, row.tolist())

    check_every_cut(tmp_path, loop, cuts=[8])
