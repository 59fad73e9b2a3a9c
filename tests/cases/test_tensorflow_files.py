"""Saves that fail, checkpoints of others and pointers that lie, with variables of TensorFlow as parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import CheckpointNotFoundError, NotARunError, SaveFailedError
from unbroken.rundir.last_words import read_last_words

from .. import quiet_tensorflow  # noqa: F401


def variables(value: float = 0.0) -> dict[str, tf.Variable]:
    return {"kernel": tf.Variable(tf.fill((3, 2), value)), "count": tf.Variable(int(value), dtype=tf.int64)}


def train(run: unbroken.Run, weights: dict[str, tf.Variable], steps: int) -> None:
    """Take steps, after each of which every variable has the number of the step as its value."""
    for _ in range(steps):
        for variable in weights.values():
            variable.assign_add(tf.ones_like(variable))
        run.step()


def trained(directory: Path, steps: int, **keywords: Any) -> dict[str, tf.Variable]:
    weights = variables()
    with unbroken.Run(directory, weights=weights, **keywords) as run:
        train(run, weights, steps)
    return weights


def names(directory: Path) -> list[str]:
    return CheckpointStore(directory).names()


@contextmanager
def nowhere_to_write(directory: Path) -> Iterator[None]:
    """Let a file stand where checkpoints are written: nobody, root included, can write below it."""
    place, away = directory / "checkpoints", directory / "away"
    place.rename(away)
    place.touch()
    try:
        yield
    finally:
        place.unlink()
        away.rename(place)


class TestAFailedSave:
    """An asynchronous save fails, training goes on, and the next one fails while deleting it (O51)."""

    def test_the_second_of_four_fails_and_the_others_are_there_with_one_failure_on_record(
        self, tmp_path: Path
    ) -> None:
        weights = variables()
        with unbroken.Run(tmp_path, save=[], keep=[unbroken.KeepLast(2)], weights=weights) as run:
            train(run, weights, 1)
            run.save()
            train(run, weights, 1)
            wait(run)
            with nowhere_to_write(tmp_path):
                run.save()
                wait(run)
            assert names(tmp_path) == ["step-00000001"], "the last good one is what it was"
            with pytest.raises(SaveFailedError, match="Not a directory"):
                train(run, weights, 1)
            run.save()
            train(run, weights, 1)
        assert names(tmp_path) == ["step-00000003", "step-00000004"]
        events = [json.loads(line) for line in (tmp_path / "attempts/0001/events-rank0.jsonl").open()]
        assert [event["step"] for event in events if event["kind"] == "saved"] == [1, 3, 4]
        assert [event["message"] for event in events if event["kind"] == "save-failed"] != []
        again = variables()
        with unbroken.Run(tmp_path, resume="must", weights=again):
            assert again["kernel"].numpy().tolist() == [[4.0, 4.0]] * 3

    def test_one_that_is_the_last_of_the_program_is_no_success(self, tmp_path: Path) -> None:
        weights = variables()
        with pytest.raises(SaveFailedError), unbroken.Run(tmp_path, save=[], weights=weights) as run:
            train(run, weights, 1)
            shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
            (tmp_path / "checkpoints").touch()
        words = read_last_words(tmp_path / "attempts/0001")
        assert words is not None
        assert (words.ending, words.kind, words.exit_code) == ("failed", "save-failed", 1)


class TestWhatOthersHaveWritten:
    """A second manager in the folder deletes the checkpoints of the first (O52)."""

    KEEP_TWO = (unbroken.KeepLast(2),)

    def test_two_runs_in_one_folder_keep_two_each(self, tmp_path: Path) -> None:
        for name, steps in (("first", 4), ("second", 3)):
            trained(tmp_path / name, steps, save=[unbroken.EverySteps(1)], keep=self.KEEP_TWO)
        assert names(tmp_path / "first") == ["step-00000003", "step-00000004"]
        assert names(tmp_path / "second") == ["step-00000002", "step-00000003"]

    def test_what_no_run_has_written_stays_where_it_is(self, tmp_path: Path) -> None:
        trained(tmp_path, 1)
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**variables()), str(tmp_path / "checkpoints"), max_to_keep=1
        )
        manager.save()
        (tmp_path / "checkpoints/notes.txt").write_text("of a person")
        before = set(os.listdir(tmp_path / "checkpoints")) - {"step-00000001"}
        trained(tmp_path, 4, save=[unbroken.EverySteps(1)], keep=self.KEEP_TWO)
        assert set(os.listdir(tmp_path / "checkpoints")) == {*before, "step-00000004", "step-00000005"}
        assert tf.train.latest_checkpoint(str(tmp_path / "checkpoints")) == manager.latest_checkpoint

    def test_a_folder_of_a_manager_is_no_place_to_begin_a_run_in(self, tmp_path: Path) -> None:
        tracked = tf.train.Checkpoint(**variables())
        tf.train.CheckpointManager(tracked, str(tmp_path / "checkpoints"), max_to_keep=1).save()
        with pytest.raises(NotARunError, match=r"expected run\.json beside checkpoints"):
            trained(tmp_path, 1)

    def test_a_checkpoint_of_another_run_is_listed_and_never_deleted(self, tmp_path: Path) -> None:
        trained(tmp_path / "other", 2)
        trained(tmp_path / "run", 3, save=[unbroken.EverySteps(1)], keep=[])
        shutil.copytree(
            tmp_path / "other/checkpoints/step-00000002", tmp_path / "run/checkpoints/step-00000002.1"
        )
        store = CheckpointStore(tmp_path / "run")
        plan = store.prune([unbroken.KeepLast(1)], run_id=store.get("step-00000003").manifest.run_id)
        assert "step-00000002.1" in plan.kept
        assert names(tmp_path / "run") == ["step-00000002.1", "step-00000003"]


class TestPointers:
    """A folder is renamed, "latest" is None, and training silently begins at zero (O53)."""

    @pytest.mark.parametrize("change", ["moved", "no pointer", "lying pointer"])
    def test_the_newest_is_found_by_looking_whatever_became_of_the_pointer(
        self, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        trained(Path("run"), 2, save=[unbroken.EverySteps(1)])
        place = Path("run")
        if change == "moved":
            place = place.rename("elsewhere")
        else:
            (place / "latest").unlink()
        if change == "lying pointer":
            (place / "latest").symlink_to("checkpoints/step-00000009")
        weights = variables()
        with unbroken.Run(place, resume="must", weights=weights) as run:
            assert (run.step_count, weights["count"].numpy()) == (2, 2)

    def test_an_empty_folder_is_no_place_to_go_on_from_where_one_must(self, tmp_path: Path) -> None:
        with (
            pytest.raises(CheckpointNotFoundError),
            unbroken.Run(tmp_path, resume="must", weights=variables()),
        ):
            pass


def wait(run: unbroken.Run) -> None:
    while run._saver.is_writing:
        pass
