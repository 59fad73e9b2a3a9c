"""Which checkpoint a run goes on from, and when it refuses to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unbroken
from unbroken.errors import CheckpointNotFoundError, DamagedError, UsageError

from .runs import flip, names, steps


class TestResumeModes:
    def test_must_without_a_checkpoint_is_an_error_with_code_4(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFoundError) as caught, unbroken.Run(tmp_path, resume="must"):
            pass
        assert caught.value.exit_code == 4

    def test_never_refuses_a_directory_with_checkpoints_and_leaves_them(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        with (
            pytest.raises(UsageError, match="expected no checkpoints"),
            unbroken.Run(tmp_path, resume="never"),
        ):
            pass
        assert names(tmp_path) == ["step-00000001"]

    def test_a_named_checkpoint_is_taken_and_later_ones_are_set_aside_not_deleted(
        self, tmp_path: Path
    ) -> None:
        counters = {"n": 0}
        with unbroken.Run(tmp_path, counters=counters, save=[unbroken.EverySteps(1)]) as run:
            for _ in range(3):
                counters["n"] += 1
                run.step()
        with unbroken.Run(tmp_path, counters=counters, resume="step-00000002") as run:
            assert (run.step_count, counters["n"]) == (2, 2)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert os.listdir(tmp_path / "quarantine") == ["step-00000003"]

    def test_an_unknown_name_is_an_error_that_lists_what_there_is(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        with (
            pytest.raises(CheckpointNotFoundError, match="expected checkpoint 'step-9', found step-00000001"),
            unbroken.Run(tmp_path, resume="step-9"),
        ):
            pass

    def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_next_older_taken(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)]) as run:
            steps(run, 3)
        flip(tmp_path / "checkpoints/step-00000003/state-00.safetensors")
        with unbroken.Run(tmp_path) as run:
            assert run.step_count == 2
            assert run.restored is not None
            assert list(run.restored.passed_over) == ["step-00000003"]
        assert "step-00000003 was passed over" in capsys.readouterr().err
        assert (tmp_path / "quarantine/step-00000003/reason.json").exists()

    def test_when_all_are_damaged_the_run_never_begins_anew_by_itself(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        flip(tmp_path / "checkpoints/step-00000001/manifest.json")
        for _ in range(2):
            with (
                pytest.raises(DamagedError, match="expected an intact checkpoint") as caught,
                unbroken.Run(tmp_path),
            ):
                pass
            assert caught.value.exit_code == 3
