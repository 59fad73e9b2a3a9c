from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage
from unbroken.testing.faults import FaultyStorage
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


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see the system calls")
def test_publishing_syncs_the_files_then_their_directory_renames_and_syncs_the_parent(tmp_path: Path) -> None:
    code = (
        "import sys; from unbroken.storage.local import LocalStorage\n"
        "s = LocalStorage(sys.argv[1]); s.write('c/first', [b'x'])\n"
        "s.stage('c/.staging-1/data', [b'y']); s.move('c/.staging-1', 'c/step-1')"
    )
    trace = tmp_path / "trace"
    subprocess.run(
        [
            *("strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2"),
            *("-o", str(trace), sys.executable, "-c", code, str(tmp_path / "root")),
        ],
        check=True,
        capture_output=True,
    )
    calls = re.findall(r"(fsync|rename)\w*\((?:\d+<)?\"?([^\",>]+)", trace.read_text())
    tail = [(call, Path(path).name) for call, path in calls][-4:]
    assert tail == [("fsync", "data"), ("fsync", ".staging-1"), ("rename", ".staging-1"), ("fsync", "c")]
