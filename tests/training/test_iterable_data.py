"""Data that is no plain loader: objects with a state, iterators, streams; each item once, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import unbroken
from tests.frameworks.stream_scenarios import Plain, WithState
from tests.some import some
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError

from .data_runs import (
    Again,
    Cursor,
    FromItsEnd,
    GivesSteps,
    Shuffled,
    consumed,
    cut_often,
    seed,
    whole,
)
from .processes import step_events, train

KINDS = [Cursor, Shuffled, FromItsEnd, GivesSteps, Again]
STOPS = {
    "first": (1,),
    "last": (9,),
    "end": (10,),
    "next": (11,),
    "twice in one epoch": (4, 3),
    "in each epoch": (4, 13, 5),
    "ends": (10, 10),
}
SCRIPT = Path(__file__).with_name("stream_script.py")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize(("build", "stops"), some({kind.__name__: kind for kind in KINDS}, STOPS, one_in=8))
def test_every_item_comes_once_and_in_its_order(
    tmp_path: Path, build: Callable[[], Any], stops: tuple[int, ...]
) -> None:
    expected = whole(tmp_path / "whole", build, epochs=3)

    assert cut_often(tmp_path / "cut", build, stops, epochs=3) == expected
    assert len(expected) == 30


@pytest.mark.parametrize("stop_at", some({"20": 20, "10": 10, "11": 11}, one_in=3))
def test_a_run_that_was_over_goes_on_with_the_next_epoch(tmp_path: Path, stop_at: int) -> None:
    expected = whole(tmp_path / "whole", Shuffled, epochs=3)
    first = whole(tmp_path / "cut", Shuffled, epochs=1)
    seed(7)

    assert first + consumed(tmp_path / "cut", Shuffled, epochs=3) == expected


# The last one takes its state for the next pass only.
@pytest.mark.parametrize(
    "build",
    [
        Cursor,
        pytest.param(Shuffled, marks=pytest.mark.chaos),
        pytest.param(FromItsEnd, marks=pytest.mark.chaos),
    ],
)
def test_an_object_that_is_a_part_too_is_restored_once(tmp_path: Path, build: Callable[[], Any]) -> None:
    def run(directory: Path, stops: tuple[int, ...]) -> list[str]:
        ledger = []
        for number, stop_at in enumerate([*stops, None]):
            seed(number)
            data = build()
            ledger += consumed(directory, lambda found=data: found, epochs=3, stop_at=stop_at, data=data)
        return [line.split(" 0.")[0] for line in ledger]

    assert run(tmp_path / "cut", (4, 6, 13)) == run(tmp_path / "whole", ())


def test_an_evaluation_over_data_with_a_state_disturbs_nothing(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        validation = DataLoader(WithState(), 8)
        return {"epochs": 3, "evaluate": lambda: list(validation)}

    expected = whole(tmp_path / "whole", Shuffled, **options())
    cut = tmp_path / "cut"
    ledger = []
    for number, stop_at in enumerate([4, 8, 12, None]):
        seed(number)
        ledger += consumed(cut, Shuffled, stop_at=stop_at, **options())

    items = [line.split()[1] for line in ledger]
    assert items == [line.split()[1] for line in expected]


@pytest.mark.parametrize("stop_at", some({str(step): step for step in range(1, 30, 4)}, one_in=3))
def test_several_with_a_state_in_one_epoch_go_on_where_they_were(tmp_path: Path, stop_at: int) -> None:
    def run_to(directory: Path, stop_at: int | None) -> list[tuple[str, object]]:
        seen: list[tuple[str, object]] = []
        data = {"first": Shuffled(4), "stream": DataLoader(WithState(), 12), "last": GivesSteps()}
        try:
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)], background=False) as run:
                for _ in run.epochs(2):
                    for name, items in data.items():
                        for item in run.batches(items, name=name):
                            if len(seen) == stop_at:
                                raise InterruptedError
                            seen.append((name, str(item)))
                            run.step()
        except InterruptedError:
            pass
        return seen

    seed(1)
    expected = run_to(tmp_path / "whole", None)
    seed(1)
    first = run_to(tmp_path / "cut", stop_at)
    seed(99)

    assert first + run_to(tmp_path / "cut", None) == expected


def test_side_by_side_they_go_on_where_they_were(tmp_path: Path) -> None:
    def run_to(directory: Path, stop_at: int | None) -> list[tuple[object, str]]:
        seen: list[tuple[object, str]] = []
        shuffled, stream = Shuffled(8), DataLoader(Plain(), 6)
        try:
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)], background=False) as run:
                for _ in run.epochs(2):
                    for one, two in zip(run.batches(shuffled), run.batches(stream), strict=True):
                        if len(seen) == stop_at:
                            raise InterruptedError
                        seen.append((one, str(two)))
                        run.step()
        except InterruptedError:
            pass
        return seen

    seed(1)
    expected = run_to(tmp_path / "whole", None)
    seed(1)
    first = run_to(tmp_path / "cut", 5)
    seed(99)

    assert first + run_to(tmp_path / "cut", None) == expected


def numbers() -> Iterator[int]:
    yield from range(10)


def test_a_generator_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="cannot go back in a generator") as caught:
        consumed(tmp_path / "run", numbers)

    assert "state_dict()" in caught.value.hint


class Fixed(Cursor):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_a_state_that_does_not_say_where_it_is_is_refused_at_the_second_item(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="the same state after two batches"):
        consumed(tmp_path / "run", Fixed)


def test_a_pass_left_early_is_said_and_not_guessed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run_once(epochs: int) -> None:
        data = Shuffled()
        with unbroken.Run(tmp_path / "run", background=False) as run:
            for _ in run.epochs(epochs):
                for item in run.batches(data):
                    run.step()
                    if item == 5:
                        break

    run_once(1)
    assert "a pass over a Shuffled was left early" in capfd.readouterr().err
    with pytest.raises(UnsupportedStateError, match="was left early"):
        run_once(2)


def test_other_data_is_refused(tmp_path: Path) -> None:
    seed(0)
    consumed(tmp_path / "run", Again, stop_at=4)

    with pytest.raises(StateMismatchError):
        consumed(tmp_path / "run", lambda: [1, 2, 3])


def test_large_states_are_kept_as_bytes_with_a_digest(tmp_path: Path) -> None:
    class Buffered(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "buffer": torch.arange(1000), "names": ("a", b"b")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert torch.equal(state["buffer"], torch.arange(1000))
            assert state["names"] == ("a", b"b")
            super().load_state_dict(state)

    expected = whole(tmp_path / "whole", Buffered)

    assert cut_often(tmp_path / "cut", Buffered, (4,)) == expected
    tensors = CheckpointStore(tmp_path / "cut").latest().manifest.tensors
    assert any(path.startswith("position/") and "buffer" in path for path in tensors)


@pytest.mark.parametrize(
    "arguments",
    [(), pytest.param(("--with-state",), marks=pytest.mark.chaos), ("--with-state", "--persistent")],
)
def test_killed_while_workers_read_ahead_it_takes_the_same_steps(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole" / "run", *arguments, script=SCRIPT)
    for kill_at in ("5", "8", "13", "-1"):
        train(tmp_path / "cut" / "run", "--kill-at", kill_at, *arguments, script=SCRIPT)

    def steps(directory: Path) -> dict[int, object]:
        # A step that was repeated has to be the same.
        found: dict[int, object] = {}
        for event in step_events(directory / "run"):
            assert found.setdefault(event["step"], event["metrics"]) == event["metrics"]
        return found

    assert steps(tmp_path / "cut") == steps(tmp_path / "whole")
    assert len(steps(tmp_path / "cut")) == 24
