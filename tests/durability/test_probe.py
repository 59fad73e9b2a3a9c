"""What a disk can do is tried out on it, and nothing of the trial stays."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import StorageDeniedError, StorageError
from unbroken.inspection.place import advise_on_place, in_words
from unbroken.storage.mounts import file_system, file_system_in
from unbroken.storage.probe import Probe, probe

from .disks import MEBIBYTE, FileSystem, room_for_disks

MOUNTS = [
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
    "23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw",
    "30 22 0:30 / /mnt/my\\040data rw - nfs4 server:/export rw,vers=4.2",
    "31 22 0:31 / /mnt/data rw master:1 - xfs /dev/vdb rw",
    "32 31 0:32 / /mnt/data rw - tmpfs tmpfs rw",
    "a line of a kernel to come",
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FileSystem]:
    with room_for_disks(tmp_path, "ext4"):
        made = FileSystem("ext4", tmp_path / "memory/disk", tmp_path / "disk", 40 * MEBIBYTE)
        made.mount()
        yield made


@pytest.fixture
def sound(tmp_path: Path) -> Probe:
    return Probe(
        directory=str(tmp_path),
        file_system="ext4",
        free_bytes=10**9,
        total_bytes=10**10,
        free_files=10**6,
        sync_seconds=0.01,
        has_direct_io=True,
        has_links=True,
        locks="hold",
        replaces_full_directories=False,
        clock_ahead_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/home/runs", "ext4"),
        ("/proc/self", "proc"),
        ("/mnt/my data/run", "nfs4"),
        ("/mnt/data", "tmpfs"),
        ("/mnt/database", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount_that_is_on_top(path: str, expected: str) -> None:
    assert file_system_in(MOUNTS, path) == expected


def test_a_real_disk_keeps_all_promises_and_nothing_of_the_trial(disk: FileSystem) -> None:
    before = os.listdir(disk.place)
    found = probe(disk.place)
    assert (found.file_system, found.locks, found.has_links, found.replaces_full_directories) == (
        ("ext4", "hold", True, False)
    )
    assert 20 * MEBIBYTE < found.free_bytes < found.total_bytes < 40 * MEBIBYTE
    assert found.free_files is not None
    assert found.free_files > 100
    assert abs(found.clock_ahead_seconds) < 5
    assert os.listdir(disk.place) == before
    assert "ext4" in in_words(found)


def test_a_disk_in_memory_is_known(disk: FileSystem) -> None:
    memory = disk.place.parent / "memory"
    assert file_system(memory) == "tmpfs"
    found = advise_on_place(probe(memory), save_bytes=1)
    assert "a reboot or a power cut takes them all" in found[0].text


def test_where_nothing_can_be_written_that_is_the_error(disk: FileSystem) -> None:
    disk.remount("ro")
    with pytest.raises(StorageDeniedError, match="Read-only file system"):
        probe(disk.place)
    with pytest.raises(StorageError, match="No such file"):
        probe(disk.place / "missing")


def _no_links(*_: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("module", "name", "made", "field", "expected"),
    [
        (os, "link", _no_links, "has_links", False),
        (fcntl, "lockf", _no_locks, "locks", "absent"),
        # It says yes, and does nothing.
        (fcntl, "lockf", lambda *_: None, "locks", "ignored"),
    ],
)
def test_what_a_file_system_lacks_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    made: Callable[..., None],
    field: str,
    expected: object,
) -> None:
    monkeypatch.setattr(module, name, made)
    assert getattr(probe(tmp_path), field) == expected
    assert os.listdir(tmp_path) == []


def test_a_rename_that_replaces_a_full_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaces(old: Path, new: Path) -> None:
        shutil.rmtree(new)
        rename(old, new)

    rename = os.rename
    monkeypatch.setattr(os, "rename", replaces)
    assert probe(tmp_path).replaces_full_directories


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"replaces_full_directories": True}, "error", "a save can destroy another one"),
        ({"locks": "ignored"}, "error", "two trainers can write to one run"),
        ({"locks": "absent"}, "warning", "there are no locks"),
        ({"free_bytes": 10**5}, "error", "room for 0.1 more saves"),
        ({"free_bytes": 15 * 10**5}, "warning", "room for 1.5 more saves"),
        ({"free_files": 10}, "warning", "room for 10 more files"),
        ({"file_system": "overlay"}, "warning", "belong to a container"),
        ({"file_system": "fuse.s3fs"}, "warning", "an object store"),
        ({"file_system": "nfs4"}, "note", "over a network"),
        ({"sync_seconds": 1.5}, "warning", "an fsync takes 1.50 s"),
        ({"clock_ahead_seconds": -60.0}, "warning", "60 s behind"),
        ({"has_direct_io": False}, "note", "no direct I/O"),
        ({"has_links": False}, "note", "no hard links"),
    ],
)
def test_each_thing_that_a_run_relies_on_is_one_advice(
    sound: Probe, changes: dict[str, Any], severity: str, words: str
) -> None:
    fields = {name: getattr(sound, name) for name in Probe.__slots__}
    assert advise_on_place(sound, save_bytes=10**6) == []
    (one,) = advise_on_place(Probe(**{**fields, **changes}), save_bytes=10**6)
    assert (one.severity, words in one.text) == (severity, True)
