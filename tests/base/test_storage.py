from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage
from unbroken.testing.faults import FaultyStorage, fails, system_calls
from unbroken.testing.storage_contract import StorageContract


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "made" / "on first write")


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()


class TestFaultyStorageWithoutFault(StorageContract):
    @pytest.fixture
    def storage(self) -> FaultyStorage:
        return FaultyStorage(MemoryStorage())


def test_an_error_of_the_system_names_the_operation_the_key_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="write file/below: Not a directory") as caught:
        LocalStorage(tmp_path).write("file/below", [b"x"])
    assert caught.value.hint


def test_a_write_that_the_system_cuts_off_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from unbroken.storage.local import LocalStorage\n"
        "try: LocalStorage(sys.argv[1]).write('a', [bytes(5000)])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("StorageError write a: File too large")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_no_space_left_raises_storage_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, mode=0o777: real_open(
            "/dev/full" if flags & os.O_CREAT else path, flags & ~(os.O_EXCL | os.O_CREAT), mode
        ),
    )
    with pytest.raises(StorageFullError, match="No space left on device"):
        LocalStorage(tmp_path).write("a", [b"x"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_rights_raises_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageDeniedError, match="write a: Permission denied"):
        LocalStorage(tmp_path).write("a", [b"x"])


def test_sweep_removes_only_what_crashed_writes_left(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("t/kept", [b"x"])
    (tmp_path / "t" / ".unbroken-tmp-1").write_bytes(b"half")
    (tmp_path / "t" / ".unbroken-tmp-2").mkdir()
    (tmp_path / "t" / ".unbroken-tmp-2" / "f").write_bytes(b"half")
    assert storage.list("t") == ["kept"]
    assert storage.sweep("t") == [".unbroken-tmp-1", ".unbroken-tmp-2"]
    assert os.listdir(tmp_path / "t") == ["kept"]


def test_a_write_that_fails_in_any_call_leaves_the_old_value_or_the_new_one_and_no_file(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(tmp_path)
    with system_calls() as calls:
        storage.write("a/b", [b"old"])
    found = set()
    for at in range(len(calls)):
        storage.write("a/b", [b"old"])
        with system_calls(fails(at, errno.EIO)), suppress(StorageError):
            storage.write("a/b", [b"new"])
        found.add(bytes(storage.read("a/b")))
        assert os.listdir(tmp_path / "a") == ["b"]
    assert found == {b"old", b"new"}


def test_move_replaces_neither_an_empty_directory_nor_a_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.stage("tree/1", [b"one"])
    storage.write("value", [b"mine"])
    (tmp_path / "empty").mkdir()
    storage.write("file", [b"theirs"])
    for source, target in (("tree", "empty"), ("tree", "file"), ("value", "file")):
        with pytest.raises(StorageError, match=f"move {target}: it exists already"):
            storage.move(source, target)
    assert storage.read("file") == b"theirs"
    assert storage.list() == ["empty", "file", "tree", "value"]


def test_a_directory_whose_maker_died_before_it_was_synced_is_synced_before_anything_is_published_in_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    storage = LocalStorage(tmp_path)
    assert directories_opened(storage, "a/b/1") == [tmp_path / "a/b", tmp_path / "a", tmp_path]
    assert directories_opened(storage, "a/b/2") == [tmp_path / "a/b"]


def directories_opened(storage: LocalStorage, key: str) -> list[Path]:
    """Only to sync them is a directory opened."""
    with system_calls() as calls:
        storage.write(key, [b"x"])
    opened = [call.arguments for call in calls if call.name == "open"]
    return [Path(path) for path, flags, *_ in opened if flags & os.O_DIRECTORY]


def test_where_no_thread_can_be_started_a_large_value_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = mmap.mmap(-1, 20 << 20)
    memory[:: 1 << 20] = bytes(range(20))
    storage = LocalStorage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        storage.stage("large", [memoryview(memory)])
    assert storage.read("large") == memory[:]


def test_a_large_write_that_fails_in_one_thread_fails_and_leaves_no_file(tmp_path: Path) -> None:
    with system_calls() as calls:
        LocalStorage(tmp_path).stage("large", [memoryview(mmap.mmap(-1, 40 << 20))])
    (tmp_path / "large").unlink()
    pieces = [call.number for call in calls if call.name == "pwrite"]
    assert len(pieces) == 5
    for at in pieces:
        with system_calls(fails(at, errno.ENOSPC)), pytest.raises(StorageFullError, match="stage large"):
            LocalStorage(tmp_path).stage("large", [memoryview(mmap.mmap(-1, 40 << 20))])
        assert os.listdir(tmp_path) == []


def test_where_the_space_is_not_told_it_is_not_known(tmp_path: Path) -> None:
    with system_calls(fails(0, errno.ENOSYS)):
        assert LocalStorage(tmp_path).space() is None
    with system_calls(fails(0, errno.EIO)), pytest.raises(StorageError, match="space"):
        LocalStorage(tmp_path).space()
    assert LocalStorage(tmp_path / "not" / "yet").space() is not None
