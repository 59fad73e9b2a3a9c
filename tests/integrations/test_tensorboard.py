"""Curves in TensorBoard, read back as TensorBoard does: each step once, whatever happened to the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.errors import UsageError

from ..dashboard.training import CrashError, train

pytest.importorskip("tensorboard", reason="reads its files: pip install tensorboard")


def read(logs: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in tags}


def test_after_a_crash_and_a_roll_back_each_step_stands_there_once(tmp_path: Path) -> None:
    from unbroken.integrations.tensorboard import Writer

    run_directory, logs = tmp_path / "run", tmp_path / "logs"
    counting: dict[int, float] = {}
    went_on_from: list[tuple[int, ...]] = []

    def attempt(**options: Any) -> None:
        boards: list[Writer] = []

        def board(run: unbroken.Run, loss: float) -> None:
            boards[:] = boards or [Writer(run, logs)]
            boards[0].add_scalar("loss", loss)
            # What is seldom written may skip the steps that a roll-back did again.
            if run.step_count % 5 == 0:
                boards[0].add_scalar("seldom", loss)
            for step in [step for step in counting if step >= run.step_count]:
                del counting[step]
            counting[run.step_count] = loss
            went_on_from.append(run.went_on_from)

        try:
            train(run_directory, each_step=board, **options)
        finally:
            boards[0].close()

    with pytest.raises(CrashError):
        attempt(crash_at=6)
    attempt(poison_at=14)

    assert went_on_from[-1][0] == 4
    assert len(went_on_from[-1]) == 2, "there was no roll-back in the process"
    found = read(logs)
    assert [step for step, _ in found["loss"]] == list(range(1, max(counting) + 1))
    assert dict(found["loss"]) == pytest.approx(counting)
    assert all(math.isfinite(value) for _, value in found["loss"])
    assert [step for step, _ in found["seldom"]] == [step for step in counting if step % 5 == 0]


@pytest.mark.parametrize("before", [True, False], ids=["before run.step", "after it"])
def test_values_that_are_written_on_either_side_of_a_step_do_not_overlap(
    tmp_path: Path, before: bool
) -> None:
    from unbroken.integrations.tensorboard import Writer

    class Counted:
        """As much of a run as the writer asks for."""

        step_count = 0
        went_on_from: tuple[int, ...] = ()

    def steps(first: int, last: int, went_on_from: tuple[int, ...]) -> None:
        run = Counted()
        run.step_count, run.went_on_from = first, went_on_from
        with Writer(run, tmp_path) as board:  # type: ignore[arg-type]
            for _ in range(first, last):
                run.step_count += not before
                board.add_scalar("loss", float(run.step_count))
                if run.step_count == 3:
                    # What is added after it goes on in another file.
                    board.close()
                run.step_count += before

    steps(0, 6, ())
    steps(4, 9, (4,))
    expected = range(9) if before else range(1, 10)
    assert read(tmp_path) == {"loss": [(step, float(step)) for step in expected]}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda board: board.add_scalar("loss", 1.0, 7), "that of the run, 0, found 7"),
        (lambda board: board.add_scalars("losses", {"a": 1.0}), "values that can be purged"),
        (
            lambda board: board.add_hparams({"lr": 0.1}, {"loss": 1.0}),
            "add_hparams: expected values that can",
        ),
    ],
)
def test_what_could_not_be_purged_is_refused(
    tmp_path: Path, wrong: Callable[[Any], None], words: str
) -> None:
    from unbroken.integrations.tensorboard import Writer

    with unbroken.Run(tmp_path / "run") as run, Writer(run, tmp_path / "logs") as board:
        with pytest.raises(UsageError, match=words):
            wrong(board)
        with pytest.raises(AttributeError):
            board.no_such_method()
        board.add_scalar("loss", 1.0, run.step_count)
    assert read(tmp_path / "logs") == {"loss": [(0, 1.0)]}
