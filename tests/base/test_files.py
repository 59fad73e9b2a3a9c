from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import StorageDeniedError, StorageFullError
from unbroken.rundir.files import create_json, read_json, sweep_temporary, write_json


class TestFiles:
    def test_a_value_is_replaced_whole_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        write_json(tmp_path / "f", {"a": 1})
        write_json(tmp_path / "f", {"b": 2})
        assert read_json(tmp_path / "f") == {"b": 2}
        assert os.listdir(tmp_path) == ["f"]

    def test_only_the_first_creates(self, tmp_path: Path) -> None:
        assert create_json(tmp_path / "f", {"a": 1})
        assert not create_json(tmp_path / "f", {"b": 2})
        assert read_json(tmp_path / "f") == {"a": 1}
        assert os.listdir(tmp_path) == ["f"]

    def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
        self, tmp_path: Path
    ) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait()
        (tmp_path / f".unbroken-tmp-{dead.pid}-00").write_text("{")
        (tmp_path / f".unbroken-tmp-{os.getpid()}-00").write_text("{")
        (tmp_path / "mine").write_text("x")
        assert sweep_temporary(tmp_path) == [f".unbroken-tmp-{dead.pid}-00"]
        assert sorted(os.listdir(tmp_path)) == [f".unbroken-tmp-{os.getpid()}-00", "mine"]

    def test_a_directory_that_a_dead_process_left_is_swept_with_what_is_in_it(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait()
        left = tmp_path / f".unbroken-tmp-{dead.pid}-00"
        left.mkdir()
        (left / "lock").write_text("x")
        assert sweep_temporary(tmp_path) == [left.name]
        assert os.listdir(tmp_path) == []

    def test_a_file_where_a_directory_should_be_is_denied_with_its_path(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        with pytest.raises(StorageDeniedError, match="f"):
            write_json(tmp_path / "f" / "g", {})

    def test_a_full_disk_is_an_error_of_its_own_and_leaves_the_old_value(self, full_disk: Path) -> None:
        (full_disk / "filler").unlink()
        write_json(full_disk / "f", {"a": 1})
        with pytest.raises(StorageFullError, match="No space left") as full:
            write_json(full_disk / "f", {"b": "x" * 65536})
        assert "free space" in full.value.hint
        assert read_json(full_disk / "f") == {"a": 1}
        assert os.listdir(full_disk) == ["f"]
