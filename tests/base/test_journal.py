from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unbroken.errors import StorageError, StorageFullError
from unbroken.rundir.journal import Journal, number, read_events


@contextmanager
def file_size_limited(size_bytes: int) -> Iterator[None]:
    """Beyond that size this process writes no file: the kernel cuts writes short there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestJournal:
    def test_events_are_read_back_in_order_with_their_fields(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "j") as journal:
            journal.append("step", step=1, loss=0.1)
            journal.append("saved", checkpoint="step-00000001")
        kinds = [(event["kind"], event.get("loss")) for event in read_events(tmp_path / "j")]
        assert kinds == [("step", 0.1), ("saved", None)]

    def test_floats_keep_every_bit_and_what_json_lacks_is_kept_as_words(self, tmp_path: Path) -> None:
        values = [0.1 + 0.2, 5e-324, -0.0, math.nan, math.inf, -math.inf]
        with Journal(tmp_path / "j") as journal:
            for value in values:
                journal.append("step", loss=value)
        found = [number(event["loss"]) for event in read_events(tmp_path / "j")]
        assert [value.hex() for value in found if value is not None] == [value.hex() for value in values]

    def test_a_torn_last_line_is_no_event_and_does_not_spoil_the_next(self, tmp_path: Path) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
        with path.open("ab") as file:
            file.write(b'{"time":1,"kind":"st')
        with Journal(path) as journal:
            journal.append("step", step=2)
        assert [event["step"] for event in read_events(path)] == [1, 2]

    @pytest.mark.parametrize("cut", range(1, 40))
    def test_a_file_cut_anywhere_gives_the_whole_events_before_the_cut(
        self, tmp_path: Path, cut: int
    ) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
            journal.append("step", step=2)
        path.write_bytes(path.read_bytes()[:-cut])
        steps = [event["step"] for event in read_events(path)]
        assert steps == [1, 2][: len(steps)]
        assert len(steps) >= 1 or cut > len(path.read_bytes())

    def test_events_of_two_writers_never_mix_in_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "j"

        def write(writer: int) -> None:
            with Journal(path) as journal:
                for step in range(300):
                    journal.append("step", writer=writer, step=step, filler="x" * 200)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(read_events(path))) == 900

    def test_an_event_after_a_line_that_the_disk_cut_short_is_not_lost_with_it(self, tmp_path: Path) -> None:
        path = tmp_path / "j"
        with Journal(path) as journal:
            journal.append("step", step=1)
            with file_size_limited(path.stat().st_size + 10):
                for _ in range(2):
                    with pytest.raises(StorageError, match="append to"):
                        journal.append("step", step=2)
            journal.append("step", step=3)
            journal.append("step", step=4)
        assert [event["step"] for event in read_events(path)] == [1, 3, 4]

    def test_a_write_that_takes_only_a_part_is_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = os.write
        with Journal(tmp_path / "j") as journal:
            monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
            journal.append("step", step=1)
            journal.append("step", step=2)
            monkeypatch.undo()
        assert [event["step"] for event in read_events(tmp_path / "j")] == [1, 2]

    def test_a_full_disk_and_a_failed_sync_are_errors_of_ours_that_name_the_journal(self) -> None:
        # A device that takes no byte, and knows no sync.
        with Journal(Path("/dev/full")) as journal:
            with pytest.raises(StorageFullError, match="append to /dev/full: No space left") as full:
                journal.append("step", step=1)
            assert "free space" in full.value.hint
            with pytest.raises(StorageError, match="sync /dev/full"):
                journal.sync()

    def test_a_journal_that_is_not_there_has_no_events(self, tmp_path: Path) -> None:
        assert list(read_events(tmp_path / "absent")) == []

    def test_a_journal_in_an_impossible_place_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="file"):
            Journal(tmp_path / "file" / "j")
