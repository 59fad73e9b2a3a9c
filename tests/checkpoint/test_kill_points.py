"""A save, a prune, a quarantine and a sweep die before, inside and after each of their operations.

The system calls inside an operation have their turn in tests/durability.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.storage.base import Storage
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage
from unbroken.testing.faults import FaultyStorage, Killed

from .states import snapshot_at, state_at

Make = Callable[[], Storage]


@pytest.fixture(params=["memory", "local"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    count = iter(range(1000))
    if request.param == "memory":
        return MemoryStorage
    return lambda: LocalStorage(tmp_path / str(next(count)))


def save_third(store: CheckpointStore) -> None:
    store.save(snapshot_at(3))
    store.prune([KeepLast(2)])


def save_third_sharing(store: CheckpointStore) -> None:
    """Save a state whose large shard is that of the checkpoint before, then prune that one."""
    state = {**state_at(3), "model": state_at(2)["model"]}
    parent = store.get("step-00000002").manifest
    write_checkpoint(store.storage, snapshot_at(3, state=state), "step-00000003", parent=parent)
    store.prune([KeepLast(1)])


def sweep(store: CheckpointStore) -> None:
    store.sweep()


def set_second_aside(store: CheckpointStore) -> None:
    store.quarantine("step-00000002", "a test")


def number_of_operations(act: Callable[[CheckpointStore], None]) -> int:
    storage = FaultyStorage(MemoryStorage())
    prepare(storage.storage)
    act(CheckpointStore(storage))
    return len(storage.operations)


def prepare(storage: Storage) -> None:
    for step in (1, 2):
        CheckpointStore(storage).save(snapshot_at(step))
        for name in ("model-00.safetensors", "manifest.json"):
            storage.stage(f"checkpoints/.staging-step-{step:08d}-dead/{name}", [b"half"])


def killed_everywhere(make: Make, act: Callable[[CheckpointStore], None]) -> list[Storage]:
    """Return the storages that a process left which died in `act`, one for each kill point."""
    left = []
    count = number_of_operations(act)
    assert count >= 2
    for at in range(count):
        for after_effect in (False, True):
            storage = make()
            prepare(storage)
            with pytest.raises(Killed):
                act(CheckpointStore(FaultyStorage(storage, at=at, after_effect=after_effect)))
            left.append(storage)
    return left


def test_the_newest_checkpoint_is_the_old_or_the_new_one_and_all_listed_ones_are_intact(make: Make) -> None:
    newest = set()
    for storage in killed_everywhere(make, save_third):
        store = CheckpointStore(storage)
        names = store.names()
        newest.add(names[-1])
        assert len(names) >= 2
        for name in names:
            checkpoint = store.get(name)
            assert checkpoint.verify().is_intact
            assert checkpoint.load() == state_at(checkpoint.step)
    assert newest == {"step-00000002", "step-00000003"}


def test_a_shard_that_two_checkpoints_share_is_whole_wherever_a_save_or_a_prune_dies(make: Make) -> None:
    newest = set()
    for storage in killed_everywhere(make, save_third_sharing):
        store = CheckpointStore(storage)
        newest.add(store.names()[-1])
        for name in store.names():
            assert store.get(name).verify().is_intact
        shared = store.get(store.names()[-1]).load()["model"]
        assert shared == state_at(2)["model"]
    assert newest == {"step-00000002", "step-00000003"}


def test_a_sweep_that_dies_harms_nothing_and_the_next_one_does_the_rest(make: Make) -> None:
    for storage in killed_everywhere(make, sweep):
        store = CheckpointStore(storage)
        store.sweep()
        assert storage.list("checkpoints") == store.names() == ["step-00000001", "step-00000002"]
        assert all(store.get(name).verify().is_intact for name in store.names())


def test_the_next_start_removes_what_the_dead_one_left_and_can_save_again(make: Make) -> None:
    swept = 0
    for storage in killed_everywhere(make, save_third):
        store = CheckpointStore(storage)
        # Beyond the two dead saves that were there before.
        swept += len(store.sweep()) - 2
        assert storage.list("checkpoints") == store.names()
        assert store.sweep() == []
        store.save(snapshot_at(4))
        store.prune([KeepLast(2)])
        assert store.names()[-1] == "step-00000004"
        assert len(store.names()) == 2
    assert swept > 0


def test_a_quarantine_that_dies_leaves_the_checkpoint_in_one_of_the_two_places(make: Make) -> None:
    for storage in killed_everywhere(make, set_second_aside):
        store = CheckpointStore(storage)
        is_listed = "step-00000002" in store.names()
        is_aside = storage.list("quarantine/step-00000002/step-00000002") != []
        assert is_listed != is_aside
        if is_aside:
            assert storage.size("quarantine/step-00000002/reason.json")
        else:
            set_second_aside(store)
            assert store.names() == ["step-00000001"]
