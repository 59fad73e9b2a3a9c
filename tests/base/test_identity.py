from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from unbroken.errors import FormatVersionError, NotARunError, UsageError
from unbroken.rundir import identity, layout


class TestIdentity:
    def test_a_new_directory_becomes_a_run_and_keeps_its_identity(self, tmp_path: Path) -> None:
        first = identity.open_run(tmp_path / "a" / "digits")
        assert first.name == "digits"
        assert identity.open_run(tmp_path / "a" / "digits") == first

    def test_two_that_race_for_a_new_run_get_the_same_identity(self, tmp_path: Path) -> None:
        found: list[identity.RunIdentity] = []
        threads = [
            threading.Thread(target=lambda: found.append(identity.open_run(tmp_path / "r"))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({run.run_id for run in found}) == 1

    def test_a_run_file_of_another_program_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"format": "something"}')
        with pytest.raises(NotARunError, match="expected format 'unbroken-run', found 'something'"):
            identity.open_run(tmp_path)

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", "nonsense", '{"format": "unbroken-run", "format_version": 1}']
    )
    def test_a_damaged_run_file_is_refused_and_left_as_it_is(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(NotARunError, match=r"run\.json"):
            identity.open_run(tmp_path)
        assert (tmp_path / "run.json").read_text() == content

    def test_a_newer_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"format": "unbroken-run", "format_version": 99}')
        with pytest.raises(FormatVersionError, match="found 99"):
            identity.open_run(tmp_path)

    def test_checkpoints_without_a_run_file_are_not_taken_over(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(NotARunError, match=r"expected run\.json beside checkpoints"):
            identity.open_run(tmp_path)
        assert os.listdir(tmp_path) == ["checkpoints"]

    def test_attempts_are_numbered_without_gaps_and_never_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(layout.ATTEMPT_VARIABLE, raising=False)
        assert [identity.claim_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
        assert layout.attempts(tmp_path) == [1, 2, 3]
        monkeypatch.setenv(layout.ATTEMPT_VARIABLE, "2")
        assert identity.claim_attempt(tmp_path) == 2

    @pytest.mark.parametrize("given", ["7", "x", "-1", ""])
    def test_an_attempt_that_was_not_made_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
    ) -> None:
        monkeypatch.setenv(layout.ATTEMPT_VARIABLE, given)
        with pytest.raises(UsageError, match="expected the number of an attempt"):
            identity.claim_attempt(tmp_path)
