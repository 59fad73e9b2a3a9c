"""What a prune looks at before it deletes, how often it reads, and whose checkpoints it touches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.retention import KeepBest, KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage

from .states import RUN_ID, snapshot_at

SMALL = {"model": {"x": 1}}


class ReadingStorage(MemoryStorage):
    """Notes the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        self.keys.append(key)
        return super().read(key, start, size_bytes)


def save(store: CheckpointStore, step: int, *, run_id: str = RUN_ID, **metrics: Any) -> str:
    return store.save(snapshot_at(step, state=SMALL, run_id=run_id, metrics=metrics)).name


def never_asked(name: str) -> bool:
    raise AssertionError(f"asked about {name}")


def test_each_manifest_is_read_once_however_often_is_pruned() -> None:
    storage = ReadingStorage()
    for step in (1, 2, 3):
        save(CheckpointStore(storage), step)
    store = CheckpointStore(storage)
    for _ in range(3):
        store.plan_prune([KeepLast(5)])
    assert sorted(key for key in storage.keys if key.endswith("manifest.json")) == [
        f"checkpoints/step-0000000{step}/manifest.json" for step in (1, 2, 3)
    ]


def test_what_the_store_saved_itself_need_not_be_read_at_all() -> None:
    storage = ReadingStorage()
    store = CheckpointStore(storage)
    for step in (1, 2, 3):
        save(store, step, accuracy=step / 10)
        store.prune([KeepBest(1, "accuracy"), KeepLast(2)], is_intact=lambda name: True)
    assert storage.keys == []
    assert store.names() == ["step-00000002", "step-00000003"]


def test_a_name_that_comes_back_is_judged_by_what_it_holds_now() -> None:
    store = CheckpointStore(MemoryStorage())
    save(store, 1, accuracy=0.9)
    save(store, 2, accuracy=0.1)
    store.plan_prune([KeepBest(1, "accuracy")])
    store.quarantine("step-00000001", "a test")
    store.plan_prune([KeepBest(1, "accuracy")])
    save(CheckpointStore(store.storage), 1, accuracy=0.0)
    save(store, 3, accuracy=0.2)
    assert list(store.plan_prune([KeepBest(1, "accuracy")]).pruned) == ["step-00000001", "step-00000002"]


def test_the_newest_checkpoint_is_verified_by_the_caller_if_it_wants_to() -> None:
    store = CheckpointStore(MemoryStorage())
    for step in (1, 2, 3):
        save(store, step)
    asked: list[str] = []

    def refuse(name: str) -> bool:
        asked.append(name)
        return False

    plan = store.prune([KeepLast(1)], is_intact=refuse)
    assert (plan.pruned, plan.blocked) == ({}, "step-00000003, the newest to go on from, is damaged")
    assert list(plan.kept) == store.names() == ["step-00000001", "step-00000002", "step-00000003"]
    assert plan.kept["step-00000001"] == plan.blocked
    assert asked == ["step-00000003"]
    assert len(store.prune([KeepLast(1)], is_intact=lambda name: True).pruned) == 2


def test_where_nothing_is_unwanted_nothing_is_verified() -> None:
    store = CheckpointStore(MemoryStorage())
    for step in (1, 2):
        save(store, step)
    assert store.prune([KeepLast(2)], is_intact=never_asked).blocked is None


def test_a_manifest_that_was_damaged_after_it_was_known_is_seen_before_anything_is_deleted(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    store.plan_prune([KeepLast(1)])
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{}")
    plan = store.prune([KeepLast(1)])
    assert (plan.pruned, plan.blocked) == ({}, "step-00000002, the newest to go on from, is damaged")


def test_a_newer_checkpoint_that_cannot_be_read_spares_all_older_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path), step)
    (tmp_path / "checkpoints/step-00000003/manifest.digest").unlink()
    plan = CheckpointStore(tmp_path).prune([KeepLast(1)])
    assert plan.pruned == {}
    assert plan.blocked is not None
    assert plan.blocked.startswith("step-00000003, the newest, cannot be read: ")


def test_a_damaged_older_checkpoint_is_kept_and_does_not_spare_the_others(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path), step)
    (tmp_path / "checkpoints/step-00000001/manifest.digest").unlink()
    plan = CheckpointStore(tmp_path).prune([KeepLast(1)])
    assert list(plan.pruned) == ["step-00000002"]
    assert plan.kept["step-00000001"].startswith("cannot be read: ")


@pytest.mark.parametrize("newer", [True, False])
def test_the_checkpoints_of_another_run_are_neither_deleted_nor_counted(newer: bool) -> None:
    store = CheckpointStore(MemoryStorage())
    for step in (7, 8, 9):
        save(store, step + (100 if newer else -6), run_id="another")
    for step in (50, 51):
        save(store, step)
    plan = store.prune([KeepLast(1)], run_id=RUN_ID)
    assert list(plan.pruned) == ["step-00000050"]
    assert sum(reason == "belongs to run another" for reason in plan.kept.values()) == 3
    assert list(plan.kept) == store.names()


def test_a_run_that_has_saved_nothing_yet_prunes_nothing() -> None:
    store = CheckpointStore(MemoryStorage())
    for step in (1, 2, 3):
        save(store, step, run_id="another")
    plan = store.prune([KeepLast(1)], run_id=RUN_ID, is_intact=never_asked)
    assert plan.pruned == {}
    assert len(store.names()) == 3


@pytest.mark.parametrize("act", [CheckpointStore.prune, CheckpointStore.plan_prune])
def test_what_is_foreign_to_us_is_left_alone(tmp_path: Path, act: Callable[..., Any]) -> None:
    store = CheckpointStore(LocalStorage(tmp_path))
    for name in ("step_final", "step-7", "best", ".hidden"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/notes.txt").write_text("mine")
    save(store, 1)
    save(store, 2)
    plan = act(store, [KeepLast(1)])
    assert sorted([*plan.kept, *plan.pruned]) == ["step-00000001", "step-00000002"]
    assert {"step_final", "step-7", "best", ".hidden", "notes.txt"} <= {
        path.name for path in (tmp_path / "checkpoints").iterdir()
    }
