from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.rundir import control, layout
from unbroken.rundir.last_words import LastWords, read_last_words, write_last_words


class TestLayout:
    @pytest.mark.parametrize("order", [(0, 0), (1200, 0), (1200, 3), (99_999_999, 0), (123_456_789, 1)])
    def test_checkpoint_names_are_read_back(self, order: tuple[int, int]) -> None:
        assert layout.parse_checkpoint_name(layout.checkpoint_name(*order)) == order

    @pytest.mark.parametrize(
        "name",
        ["step_final", "step-12", "step-00000012.0", "step-000000012", "step-00000012-x", ".staging-x"],
    )
    def test_other_names_are_no_checkpoints(self, name: str) -> None:
        assert layout.parse_checkpoint_name(name) is None


class TestRequestsAndLastWords:
    def test_a_stop_request_is_seen_until_it_is_withdrawn(self, tmp_path: Path) -> None:
        assert control.read_stop(tmp_path) is None
        control.request_stop(tmp_path, reason="maintenance", deadline_seconds=5.0)
        found = control.read_stop(tmp_path)
        assert found == control.StopRequest(reason="maintenance", deadline_seconds=5.0)
        control.clear_stop(tmp_path)
        assert control.read_stop(tmp_path) is None

    def test_a_stop_request_that_cannot_be_read_still_stops(self, tmp_path: Path) -> None:
        (tmp_path / "control").mkdir()
        (tmp_path / layout.STOP_FILE).write_text("{")
        assert control.read_stop(tmp_path) is not None

    def test_a_save_request_is_taken_once(self, tmp_path: Path) -> None:
        control.request_save(tmp_path)
        assert [control.take_save_request(tmp_path) for _ in range(2)] == [True, False]

    def test_last_words_are_read_back(self, tmp_path: Path) -> None:
        words = LastWords(ending="stopped", step=7, checkpoint="step-00000007", reason="signal SIGTERM")
        write_last_words(tmp_path, words)
        assert read_last_words(tmp_path) == words

    @pytest.mark.parametrize("content", ["", "{", '{"ending": "exploded"}', '{"ending": "stopped"}', "[1]"])
    def test_words_that_cannot_be_understood_are_none(self, tmp_path: Path, content: str) -> None:
        (tmp_path / layout.LAST_WORDS).write_text(content)
        assert read_last_words(tmp_path) is None
