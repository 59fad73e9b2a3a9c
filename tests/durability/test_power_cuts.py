"""The power is cut at random moments while checkpoints are saved and pruned without a pause."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UnbrokenError

from .disks import Disk, room_for_disks
from .saver import KEPT, save

PROGRESS_SECONDS = 60.0


class Saver(threading.Thread):
    """Saves and prunes until the disk is gone, and remembers which saves have returned.

    A thread will do: after the cut the file system takes nothing from it that could still matter.
    """

    def __init__(self, directory: Path, first: int) -> None:
        super().__init__(name="saver")
        self.store = CheckpointStore(directory)
        self.step = first
        self.reported = 0
        self.error: UnbrokenError | None = None
        self.start()

    def run(self) -> None:
        try:
            while True:
                save(self.store, self.step)
                self.reported = self.step
                self.store.prune([KeepLast(KEPT)])
                self.step += 1
        except UnbrokenError as error:
            self.error = error


def survive(disk: Disk, cuts: int, *, loses_cache: bool) -> int:
    """Return how many cuts were seen to have interrupted something."""
    dice = random.Random(cuts)
    place = disk.content.place / "run"
    newest = interrupted = 0
    for _ in range(cuts):
        saver = Saver(place, newest + 1)
        try:
            wait_for_progress(saver)
            # Not a wait for something to happen: the moment of the cut is what is random here.
            time.sleep(dice.random() * 0.05)
            # Later reports do not count: a file system that is being shut down has been seen to say that
            # an fsync was done which was not (XFS), and with the power gone nobody would hear it.
            reported = saver.reported
        finally:
            disk.cut_power(dice, loses_cache=loses_cache)
            saver.join()
        disk.power_on()
        store = CheckpointStore(place)
        interrupted += bool(store.sweep())
        newest = check(store, reported)
    print(f"\n{cuts} power cuts, {interrupted} left something to sweep, {newest} saves")
    return interrupted


def wait_for_progress(saver: Saver) -> None:
    deadline = time.monotonic() + PROGRESS_SECONDS
    while saver.reported == 0 and saver.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert saver.reported, f"nothing was saved: {saver.error}"


def check(store: CheckpointStore, reported: int) -> int:
    """What was reported as saved is there, all is whole, one more can be saved; return that one's step."""
    names = store.names()
    for name in names:
        assert store.get(name).verify().is_intact, name
    newest = store.get(names[-1]).step
    assert newest >= reported, "a checkpoint that was reported as saved is gone"
    save(store, newest + 1)
    assert store.latest().verify().is_intact
    assert store.latest().step == newest + 1
    store.prune([KeepLast(KEPT)])
    return newest + 1


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with room_for_disks(tmp_path, request.param) as place:
        yield Disk(request.param, place)


@pytest.mark.parametrize("loses_cache", [False, True], ids=["the disk keeps its cache", "loses its cache"])
@pytest.mark.parametrize("disk", ["ext4", "xfs"], indirect=True)
def test_a_few_power_cuts_lose_nothing_that_was_reported_as_saved(disk: Disk, loses_cache: bool) -> None:
    survive(disk, 4, loses_cache=loses_cache)


@pytest.mark.chaos
@pytest.mark.parametrize("loses_cache", [False, True], ids=["the disk keeps its cache", "loses its cache"])
@pytest.mark.parametrize("disk", ["ext4", "xfs"], indirect=True)
def test_three_hundred_power_cuts_lose_nothing_that_was_reported_as_saved(
    disk: Disk, loses_cache: bool
) -> None:
    assert survive(disk, 75, loses_cache=loses_cache) > 0
