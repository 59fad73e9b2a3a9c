"""Names and counters: one meaning for each number, "last" is the newest, "best" is the best."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.utils.data import DataLoader

import unbroken
from unbroken import CheckpointStore
from unbroken.checkpoint.retention import CheckpointFacts
from unbroken.training.position import Position

from .scenes import ask_to_stop, fails, restore, run_of, save


class CrashError(Exception):
    """As if the process had ended: nothing is saved from here on."""


POINTS = ["inside an epoch", "at the last batch", "after the batches", "after the evaluation", "between two"]


class TestEpochs:
    """An epoch is repeated, or its rest is skipped (Lightning-AI/pytorch-lightning#850)."""

    def attempt(self, directory: Path, point: str = "") -> list[tuple[int, list[int]]]:
        """Train three epochs of four batches; stop at `point` in the second. Return epochs and samples."""
        self.found: list[tuple[int, list[int]]] = []
        loader = DataLoader(list(range(8)), batch_size=2)
        with run_of(directory, (), save=[]) as run:
            for epoch in run.epochs(3):
                if (point, epoch) == ("between two", 2):
                    raise CrashError
                for index, samples in enumerate(run.batches(loader)):
                    self.found.append((epoch, samples.tolist()))
                    run.step()
                    if (point, epoch, index) in (("inside an epoch", 1, 1), ("at the last batch", 1, 3)):
                        ask_to_stop()
                if (point, epoch) == ("after the batches", 1):
                    run.save()
                    raise CrashError
                run.record(accuracy=epoch / 10)
                if (point, epoch) == ("after the evaluation", 1):
                    run.save()
                    raise CrashError
                if point == "between two":
                    # Captured when the body of the epoch is done.
                    run._saves.wanted = True
            self.steps = run.step_count
        return self.found

    def play(self, directory: Path, point: str) -> None:
        expected = self.attempt(directory / "twin")
        with pytest.raises((CrashError, SystemExit)):
            self.attempt(directory / "run", point)
        before = self.found
        assert before + self.attempt(directory / "run") == expected
        assert self.steps == 12

    @pytest.mark.parametrize("point", POINTS, ids=lambda point: point.replace(" ", "-"))
    def test_every_epoch_is_trained_once_wherever_it_was_saved(self, tmp_path: Path, point: str) -> None:
        self.play(tmp_path, point)

    # No handler is in this: the position belongs to the run itself, so it is broken there.
    @pytest.mark.parametrize("point", POINTS, ids=lambda point: point.replace(" ", "-"))
    def test_it_is_not_where_one_number_means_both_the_present_and_the_completed_epoch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
    ) -> None:
        restore_position = Position.restore
        shift = -1 if point == "between two" else 1

        def with_one_number(self: Position, saved: Any, loaders: Any) -> None:
            restore_position(self, msgspec.structs.replace(saved, epoch=saved.epoch + shift), loaders)

        monkeypatch.setattr(Position, "restore", with_one_number)
        with fails():
            self.play(tmp_path, point)


class BestOfThisAttempt:
    """A broken policy: what earlier attempts kept is not in its list, so it stays for ever."""

    def __init__(self) -> None:
        self._others: set[str] | None = None

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        if self._others is None:
            self._others = {found.name for found in checkpoints[:-1]}
        own = [found for found in checkpoints if found.name not in self._others]
        best = sorted(own, key=lambda found: -found.metrics.get("accuracy", 0.0))[:3]
        return dict.fromkeys([*self._others, *(found.name for found in best)], "kept")


class TestBestAndLast:
    """ "last" led to the best, and top-k began anew (Lightning-AI/pytorch-lightning#19189)."""

    def attempt(self, directory: Path, accuracies: list[float], policy: Any) -> None:
        with run_of(directory, (), save=[], keep=[policy]) as run:
            done = run.step_count
            for epoch in run.epochs(done + len(accuracies)):
                run.step()
                run.record(accuracy=accuracies[epoch - done])

    def play(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
        self.attempt(tmp_path / "first", [0.1, 0.9, 0.8, 0.3], make())
        # To another place, and from another working directory.
        (tmp_path / "elsewhere").mkdir()
        shutil.move(tmp_path / "first", tmp_path / "elsewhere/second")
        monkeypatch.chdir(tmp_path / "elsewhere")
        self.attempt(Path("second"), [0.7, 0.2, 0.05], make())
        kept = [CheckpointStore("second").get(name) for name in CheckpointStore("second").names()]
        # The best three of both attempts, and the newest, though it is the worst.
        assert [(found.step, found.manifest.metrics["accuracy"]) for found in kept] == [
            (2, 0.9),
            (3, 0.8),
            (5, 0.7),
            (7, 0.05),
        ]
        assert not Path(os.readlink("second/latest")).is_absolute()
        assert Path("second/latest").resolve().name == "step-00000007"

    def test_the_best_three_of_two_attempts_are_kept_and_last_is_the_newest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.play(tmp_path, monkeypatch, lambda: unbroken.KeepBest(3, "accuracy"))

    def test_they_are_not_where_the_list_of_kept_ones_begins_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fails():
            self.play(tmp_path, monkeypatch, BestOfThisAttempt)

    @pytest.mark.parametrize("target", ["checkpoints/step-00000002", "checkpoints/gone", ""])
    def test_a_pointer_to_another_checkpoint_or_to_none_misleads_no_resume(
        self, tmp_path: Path, target: str
    ) -> None:
        self.attempt(tmp_path, [0.1, 0.9, 0.8, 0.3], unbroken.KeepBest(3, "accuracy"))
        (tmp_path / "latest").unlink()
        if target:
            (tmp_path / "latest").symlink_to(target)
        assert restore(tmp_path)[0].startswith("resumed from step-00000004 ")


class TestOrder:
    """Step 500 was taken for newer than 2500 (nvidia-cosmos/cosmos-rl#232)."""

    # No handler is in this: names and retention are for the store.
    def test_the_newest_is_that_of_the_highest_step_whatever_the_text_and_time_of_its_name(
        self, tmp_path: Path
    ) -> None:
        with run_of(tmp_path, (), save=[unbroken.EverySteps(5)], keep=[unbroken.KeepLast(2)]) as run:
            (tmp_path / "checkpoints/step_final").mkdir(parents=True)
            for _ in range(20):
                run.step()
        for name, time in zip(CheckpointStore(tmp_path).names(), (2_000_000_000, 0), strict=True):
            os.utime(tmp_path / "checkpoints" / name, (time, time))
        assert CheckpointStore(tmp_path).names() == ["step-00000015", "step-00000020"]
        assert restore(tmp_path)[0].startswith("resumed from step-00000020 ")


class TestTwoCandidates:
    """Killed during a save, a run refuses to start until someone tidies up (NVIDIA-NeMo/Speech#7948)."""

    # No handler is in this: which checkpoint to go on from is chosen before one is restored.
    def counted(self, directory: Path, counters: dict[str, int]) -> None:
        save(directory, counters=counters)

    def test_one_that_is_not_complete_is_passed_over_and_said_so(self, tmp_path: Path) -> None:
        self.counted(tmp_path, {"n": 1})
        self.counted(tmp_path, {"n": 2})
        (tmp_path / "checkpoints/step-00000002/manifest.json").unlink()
        counters = {"n": 0}
        lines = restore(tmp_path, counters=counters)
        assert counters == {"n": 1}
        assert lines[0].startswith("resumed from step-00000001 ")
        assert any("step-00000002 was passed over" in line for line in lines)

    def test_one_that_was_being_written_is_swept_and_nothing_is_asked(self, tmp_path: Path) -> None:
        self.counted(tmp_path, {"n": 1})
        whole = tmp_path / "checkpoints/step-00000001"
        left = tmp_path / "checkpoints/.staging-step-00000002-left"
        shutil.copytree(whole, left)
        assert restore(tmp_path, counters={"n": 0})[0].startswith("resumed from step-00000001 ")
        assert not left.exists()

    def test_of_two_complete_ones_the_higher_step_is_taken(self, tmp_path: Path) -> None:
        self.counted(tmp_path, {"n": 1})
        self.counted(tmp_path, {"n": 0})
        assert CheckpointStore(tmp_path).names() == ["step-00000001", "step-00000002"]
        assert restore(tmp_path, counters={"n": 0})[0].startswith("resumed from step-00000002 ")

    def test_of_two_of_one_step_from_two_attempts_the_later_is_taken(self, tmp_path: Path) -> None:
        self.counted(tmp_path, {"n": 1})
        counters = {"n": 0}
        with run_of(tmp_path, (), counters=counters):
            # No step is taken, but the state is another one when it ends.
            counters["n"] = 5
        assert CheckpointStore(tmp_path).names() == ["step-00000001", "step-00000001.1"]
        again = {"n": 0}
        assert restore(tmp_path, counters=again)[0].startswith("resumed from step-00000001.1 ")
        assert again == {"n": 5}
