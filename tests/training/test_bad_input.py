"""Wrong directories and wrong parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import unbroken
from unbroken.errors import NotARunError, RunBusyError, StateMismatchError, UnsupportedStateError, UsageError
from unbroken.rundir import layout

from .runs import steps, tree_of, words_of


class TestBadInput:
    """Each gives one clear error, and leaves everything as it was."""

    def test_no_directory_at_all(self) -> None:
        with pytest.raises(UsageError, match="expected a run directory"):
            unbroken.Run(counters={})

    def test_a_directory_that_contradicts_the_supervisor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(layout.RUN_DIR_VARIABLE, str(tmp_path / "a"))
        assert unbroken.Run().directory == tmp_path / "a"
        with pytest.raises(UsageError, match=r"expected the run directory .*/a .* found .*/b in the script"):
            unbroken.Run(tmp_path / "b")

    def test_a_file_where_the_directory_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("mine")
        with pytest.raises(unbroken.UnbrokenError, match="/f") as caught, unbroken.Run(tmp_path / "f"):
            pass
        assert caught.value.exit_code == 78
        assert (tmp_path / "f").read_text() == "mine"

    def test_a_directory_of_another_program(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"mine": true}')
        before = tree_of(tmp_path)
        with pytest.raises(NotARunError, match="expected format 'unbroken-run'"), unbroken.Run(tmp_path):
            pass
        assert tree_of(tmp_path) == before

    def test_checkpoints_of_another_run(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            with unbroken.Run(tmp_path / name) as run:
                steps(run, 1 if name == "a" else 2)
        source = tmp_path / "a/checkpoints/step-00000001"
        source.rename(tmp_path / "b/checkpoints/step-00000001")
        (tmp_path / "b/checkpoints/step-00000002").rename(tmp_path / "x")
        with pytest.raises(NotARunError, match="expected checkpoints of run"), unbroken.Run(tmp_path / "b"):
            pass

    @pytest.mark.parametrize(
        ("value", "hint"),
        [(3, "pass part={'value': 3}"), ("x", "pass part="), (object(), "state_dict"), (open, "state_dict")],
        ids=["int", "str", "object", "function"],
    )
    def test_an_object_that_cannot_be_captured_is_named_before_anything_is_made(
        self, tmp_path: Path, value: object, hint: str
    ) -> None:
        with (
            pytest.raises(UnsupportedStateError, match="part 'part': cannot keep") as caught,
            unbroken.Run(tmp_path / "r", part=value),
        ):
            pass
        assert hint in caught.value.hint
        assert caught.value.exit_code == 78
        assert not (tmp_path / "r").exists()

    def test_a_part_that_changed_its_shape(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, model=torch.nn.Linear(3, 4)) as run:
            steps(run, 1)
        model = torch.nn.Linear(3, 5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        kept = tree_of(tmp_path / "checkpoints")
        with pytest.raises(StateMismatchError) as caught, unbroken.Run(tmp_path, model=model):
            pass
        assert "model: weight: shape (5, 3), the checkpoint has shape (4, 3)" in str(caught.value)
        assert "model: bias: shape (5,), the checkpoint has shape (4,)" in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert tree_of(tmp_path / "checkpoints") == kept
        assert (words_of(tmp_path).ending, words_of(tmp_path).exit_code) == ("failed", 78)

    def test_a_part_that_is_missing_or_new(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, a={"x": 1}, b={}) as run:
            steps(run, 1)
        with pytest.raises(StateMismatchError) as caught, unbroken.Run(tmp_path, a=[], c={}):
            pass
        assert "c: the checkpoint lacks this part" in str(caught.value)
        assert "b: the program lacks this part" in str(caught.value)
        assert "a: expected a list, the checkpoint holds a dict" in str(caught.value)

    def test_a_second_run_in_the_same_directory_is_refused(self, tmp_path: Path) -> None:
        import subprocess
        import sys

        code = f"import unbroken\nwith unbroken.Run({str(tmp_path)!r}): pass"
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == RunBusyError.exit_code
        assert f"process {os.getpid()} on " in done.stderr
        assert "hint: " in done.stderr
        assert layout.attempts(tmp_path) == [1]
