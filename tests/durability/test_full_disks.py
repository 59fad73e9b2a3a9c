"""Real disks that are full, have no inode left, may not be written, or are gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.storage.base import Space
from unbroken.storage.local import LocalStorage

from ..checkpoint.states import snapshot_at, state_at
from .disks import MEBIBYTE, FileSystem, room_for_disks

Make = Callable[..., FileSystem]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Make]:
    def make(*options: str) -> FileSystem:
        disk = FileSystem("ext4", tmp_path / "memory/disk", tmp_path / "disk", 40 * MEBIBYTE, *options)
        disk.mount()
        return disk

    with room_for_disks(tmp_path, "ext4"):
        yield make


class SpaceUnknown(LocalStorage):
    """As on many network file systems: that it is full shows when it is."""

    def space(self) -> Space | None:
        return None


def save_until_it_is_full(store: CheckpointStore) -> StorageFullError:
    with pytest.raises(StorageFullError) as caught:
        for step in range(1, 1000):
            store.save(snapshot_at(step))
    return caught.value


def check_intact_and_clean(store: CheckpointStore, place: Path) -> None:
    names = store.names()
    assert sorted(os.listdir(place / "run" / "checkpoints")) == names
    for name in names:
        assert store.get(name).load() == state_at(store.get(name).step)


@pytest.mark.parametrize("kind", [LocalStorage, SpaceUnknown])
def test_a_full_disk_costs_no_checkpoint_and_after_pruning_there_is_room_again(
    make_disk: Make, kind: type[LocalStorage]
) -> None:
    place = make_disk().place
    store = CheckpointStore(kind(place / "run"))
    caught = save_until_it_is_full(store)
    if kind is SpaceUnknown:
        assert "No space left on device" in caught.message
    assert "free" in caught.hint
    assert len(store.names()) > 10
    check_intact_and_clean(store, place)
    store.prune([KeepLast(2)])
    store.save(snapshot_at(1000))
    assert len(store.names()) == 3
    check_intact_and_clean(store, place)


def test_wherever_in_a_save_the_disk_gets_full_it_is_as_before(make_disk: Make) -> None:
    place = make_disk().place
    store = CheckpointStore(SpaceUnknown(place / "run"))
    for step in (1, 2):
        store.save(snapshot_at(step))
    filler = place / "filler"
    outcomes = set()
    for left_bytes in range(0, 1_400_000, 50_000):
        fill(filler, left_bytes)
        try:
            checkpoint = store.save(snapshot_at(3))
            outcomes.add("saved")
            store.storage.delete(f"checkpoints/{checkpoint.name}")
        except StorageFullError as caught:
            outcomes.add(caught.message.split(" ")[0])
            check_intact_and_clean(store, place)
    assert outcomes == {"stage", "saved"}
    assert store.names() == ["step-00000001", "step-00000002"]


def fill(filler: Path, left_bytes: int) -> None:
    """Leave only so much."""
    filler.touch()
    os.truncate(filler, 0)
    free = LocalStorage(filler.parent).space()
    assert free is not None
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(free.free_bytes - left_bytes, 1))
        while left_bytes == 0:
            file.write(bytes(4096))


@pytest.mark.parametrize("kind", [LocalStorage, SpaceUnknown])
def test_a_disk_without_inodes_costs_no_checkpoint_and_after_pruning_there_are_some(
    make_disk: Make, kind: type[LocalStorage]
) -> None:
    place = make_disk("-N", "32").place
    store = CheckpointStore(kind(place / "run"))
    caught = save_until_it_is_full(store)
    assert "free" in caught.hint
    space = LocalStorage(place).space()
    assert space is not None
    assert space.free_files is not None
    assert space.free_files < 6
    assert space.free_bytes > 10 * MEBIBYTE
    check_intact_and_clean(store, place)
    store.prune([KeepLast(1)])
    store.save(snapshot_at(1000))
    check_intact_and_clean(store, place)


def test_a_disk_that_may_only_be_read_is_denied_with_the_remedy_and_can_be_read(make_disk: Make) -> None:
    disk = make_disk()
    store = CheckpointStore(disk.place / "run")
    for step in (1, 2):
        store.save(snapshot_at(step))
    disk.remount("ro")
    acts: list[Callable[[], object]] = [
        lambda: store.save(snapshot_at(3)),
        lambda: store.prune([KeepLast(1)]),
        lambda: store.quarantine("step-00000001", "a test"),
    ]
    for act in acts:
        with pytest.raises(StorageDeniedError, match="Read-only file system") as caught:
            act()
        assert "mount it for writing" in caught.value.hint
    check_intact_and_clean(store, disk.place)
    disk.remount("rw")
    store.save(snapshot_at(3))
    check_intact_and_clean(store, disk.place)


def test_a_disk_that_is_gone_says_so_and_has_everything_when_it_is_back(make_disk: Make) -> None:
    disk = make_disk()
    store = CheckpointStore(disk.place / "run")
    store.save(snapshot_at(1))
    disk.shut_down()
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)) as caught:
        store.save(snapshot_at(2))
    assert "kernel's log" in caught.value.hint
    disk.unmount()
    disk.mount()
    store.save(snapshot_at(2))
    check_intact_and_clean(store, disk.place)
