"""What is pinned is never pruned, and what cannot be read never means that nothing is."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from unbroken.checkpoint import pins
from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import CheckpointNotFoundError, DamagedError
from unbroken.storage.base import Storage
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage

from .states import snapshot_at

SMALL = {"model": {"x": 1}}
DAMAGES = {
    "empty": b"",
    "torn": b'{"format": "unbroken-pins", "pi',
    "of another kind": b'{"step-00000001": {}}',
    "a list": b"[]",
    "a pin without its fields": b'{"format": "unbroken-pins", "pins": {"step-00000001": {}}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "local" else MemoryStorage()


def store_with(storage: Storage, *steps: int) -> CheckpointStore:
    store = CheckpointStore(storage)
    for step in steps:
        store.save(snapshot_at(step, state=SMALL))
    return store


def pin(store: CheckpointStore, name: str, note: str = "") -> pins.Pin:
    return pins.pin(store.storage, name, note, exists=lambda name: name in store.names())


def test_a_pinned_checkpoint_is_kept_with_its_note_until_the_pin_is_removed(storage: Storage) -> None:
    store = store_with(storage, 1, 2, 3)
    pin(store, "step-00000001", "the paper's")
    plan = store.prune([KeepLast(1)])
    assert plan.kept == {"step-00000001": "pinned: the paper's", "step-00000003": "the newest"}
    assert list(plan.pruned) == ["step-00000002"]
    pin(store, "step-00000001")
    assert store.plan_prune([KeepLast(1)]).kept["step-00000001"] == "pinned"
    assert pins.unpin(storage, "step-00000001") is not None
    assert pins.unpin(storage, "step-00000001") is None
    store.prune([KeepLast(1)])
    assert store.names() == ["step-00000003"]


def test_only_a_checkpoint_that_is_there_can_be_pinned(storage: Storage) -> None:
    store = store_with(storage, 1)
    with pytest.raises(CheckpointNotFoundError, match="expected checkpoint 'step-00000002'"):
        pin(store, "step-00000002")
    assert pins.read_pins(storage) == {}


def test_a_checkpoint_that_is_pruned_while_it_is_pinned_is_not_said_to_be_pinned(storage: Storage) -> None:
    store_with(storage, 1)
    answers = iter([True, False])
    with pytest.raises(CheckpointNotFoundError):
        pins.pin(storage, "step-00000001", "", exists=lambda _: next(answers))
    assert pins.read_pins(storage) == {}


@pytest.mark.parametrize("damage", DAMAGES)
def test_while_the_pins_cannot_be_read_nothing_is_pruned_and_the_plan_says_why(
    storage: Storage, damage: str
) -> None:
    store = store_with(storage, 1, 2)
    storage.write("pins.json", [DAMAGES[damage]])
    plan = store.prune([KeepLast(1)])
    assert plan.pruned == {}
    assert plan.blocked is not None
    assert "which checkpoints are pinned is not known: pins.json: expected the pins of a run" in plan.blocked
    assert set(plan.kept.values()) == {plan.blocked}
    assert store.names() == ["step-00000001", "step-00000002"]
    with pytest.raises(DamagedError, match=r"pins\.json"):
        pin(store, "step-00000001")
    assert bytes(storage.read("pins.json")) == DAMAGES[damage]


@pytest.mark.parametrize("obstacle", ["directory", "dangling link"])
def test_whatever_stands_in_the_place_of_the_pins_does_not_count_as_no_pins(
    tmp_path: Path, obstacle: str
) -> None:
    store = store_with(LocalStorage(tmp_path), 1, 2)
    place = tmp_path / "pins.json"
    place.mkdir() if obstacle == "directory" else place.symlink_to("gone")
    assert store.prune([KeepLast(1)]).blocked is not None
    assert len(store.names()) == 2


def test_a_pin_that_is_set_while_the_newest_checkpoint_is_verified_counts(storage: Storage) -> None:
    store = store_with(storage, 1, 2, 3)

    def verify_slowly(name: str) -> bool:
        pin(store, "step-00000002", "just in time")
        return True

    plan = store.prune([KeepLast(1)], is_intact=verify_slowly)
    assert list(plan.pruned) == ["step-00000001"]
    assert list(plan.kept) == ["step-00000002", "step-00000003"]


def test_while_another_process_changes_the_pins_a_prune_deletes_nothing_and_does_not_wait(
    tmp_path: Path,
) -> None:
    store = store_with(LocalStorage(tmp_path), 1, 2)
    with pins.held(LocalStorage(tmp_path), wait=True):
        plan = store.prune([KeepLast(1)])
    assert plan.blocked == "pins are being changed at this moment"
    assert len(store.names()) == 2
    assert list(store.prune([KeepLast(1)]).pruned) == ["step-00000001"]


def test_a_process_that_was_forked_while_pins_were_held_does_not_hold_them(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    reading, writing = os.pipe()
    with pins.held(storage, wait=True):
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        with pins.held(storage, wait=False) as is_ours:
            assert is_ours
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def pin_many(directory: Path, steps: range) -> None:
    store = CheckpointStore(directory)
    for step in steps:
        pin(store, f"step-{step:08d}", str(step))


def test_of_many_pins_set_by_several_processes_at_once_none_is_lost(tmp_path: Path) -> None:
    store_with(LocalStorage(tmp_path), *range(1, 13))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=pin_many, args=(tmp_path, range(first, 13, 3))) for first in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(pins.read_pins(LocalStorage(tmp_path))) == 12


def test_the_file_is_plain_for_people(tmp_path: Path) -> None:
    store = store_with(LocalStorage(tmp_path), 1)
    found = pin(store, "step-00000001", "für später")
    value = json.loads((tmp_path / "pins.json").read_text())
    assert value == {
        "format": "unbroken-pins",
        "pins": {"step-00000001": {"note": "für später", "pinned": found.pinned}},
    }
