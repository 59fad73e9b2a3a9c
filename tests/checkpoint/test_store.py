from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore, newest_verified
from unbroken.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatVersionError,
    StaleWriterError,
    StorageError,
)
from unbroken.storage.base import Storage
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage

from .states import snapshot_at, state_at


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    storage: Storage = LocalStorage(tmp_path) if request.param == "local" else MemoryStorage()
    return CheckpointStore(storage)


def test_what_was_saved_is_loaded_without_a_framework(store: CheckpointStore) -> None:
    store.save(snapshot_at(7))
    found = store.latest()
    assert (found.name, found.step) == ("step-00000007", 7)
    assert found.load() == state_at(7)
    assert found.verify().is_intact


def test_names_are_in_the_order_of_steps_not_of_text(store: CheckpointStore) -> None:
    for step in (99_999_999, 5, 100_000_000):
        store.save(snapshot_at(step))
    assert store.names() == ["step-00000005", "step-99999999", "step-100000000"]
    assert store.latest().step == 100_000_000


def test_two_states_of_one_step_are_both_kept_and_the_later_is_the_newest(store: CheckpointStore) -> None:
    store.save(snapshot_at(5))
    store.save(snapshot_at(5, state={"model": {"x": 1}}))
    assert store.names() == ["step-00000005", "step-00000005.1"]
    assert store.latest().load() == {"model": {"x": 1}}


def test_an_empty_store_has_no_latest(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFoundError, match="expected a checkpoint, found none"):
        store.latest()


def test_an_unknown_name_is_an_error_that_says_what_there_is(store: CheckpointStore) -> None:
    store.save(snapshot_at(5))
    with pytest.raises(CheckpointNotFoundError, match="expected checkpoint 'step-1', found step-00000005"):
        store.get("step-1")


def test_stray_directories_are_neither_listed_nor_pruned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in ("step_final", "step-7", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for step in (1, 2):
        store.save(snapshot_at(step))
    store.prune([KeepLast(1)])
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["best", "step-00000002", "step-7", "step_final"]


def test_latest_passes_over_a_damaged_manifest_and_all_damaged_is_not_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot_at(step))
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{}")
    assert store.latest().step == 1
    (tmp_path / "checkpoints/step-00000001/manifest.digest").unlink()
    with pytest.raises(DamagedError, match="step-00000002"):
        store.latest()


def test_a_newer_format_is_refused_not_taken_for_damage(tmp_path: Path) -> None:
    from unbroken.checkpoint.digest import seal

    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    path = tmp_path / "checkpoints/step-00000001/manifest.json"
    manifest = {**json.loads(path.read_text()), "format_version": 99}
    path.write_text(json.dumps(manifest))
    (path.parent / "manifest.digest").write_text(f"{seal(path.read_bytes())}  manifest.json\n")
    with pytest.raises(FormatVersionError, match="expected format version 2 or older, found 99"):
        store.latest()


def test_quarantine_keeps_the_checkpoint_and_the_reason_and_frees_the_name(store: CheckpointStore) -> None:
    for reason in ("first", "second"):
        store.save(snapshot_at(3))
        store.quarantine("step-00000003", reason)
    assert store.names() == []
    assert store.storage.list("quarantine") == ["step-00000003", "step-00000003-2"]
    words = json.loads(bytes(store.storage.read("quarantine/step-00000003-2/reason.json")))
    assert words["reason"] == "second"
    assert store.storage.list("quarantine/step-00000003/step-00000003") != []


def test_a_writer_that_may_not_commit_leaves_nothing(store: CheckpointStore) -> None:
    def superseded() -> None:
        raise StaleWriterError("superseded", hint="end")

    with pytest.raises(StaleWriterError):
        store.save(snapshot_at(3), before_commit=superseded)
    assert store.storage.list("checkpoints") == []


def test_a_failed_save_removes_its_own_files_and_nothing_else(tmp_path: Path) -> None:
    from unbroken.testing.faults import FaultyStorage

    CheckpointStore(tmp_path).save(snapshot_at(1))
    before = tree_of(tmp_path)
    for at in range(5):
        storage = FaultyStorage(LocalStorage(tmp_path), at=at)
        storage.fail = fail
        with pytest.raises(StorageError, match="injected"):
            CheckpointStore(storage).save(snapshot_at(2))
        assert tree_of(tmp_path) == before


def fail() -> None:
    raise StorageError("injected", hint="none")


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_pruning_reports_a_reason_for_each_victim_and_a_plan_deletes_nothing(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(snapshot_at(step))
    plan = store.plan_prune([KeepLast(2)])
    assert store.names() == ["step-00000001", "step-00000002", "step-00000003"]
    assert plan.pruned == {"step-00000001": "wanted by none of KeepLast(count=2)"}
    assert store.prune([KeepLast(2)]) == plan
    assert store.names() == ["step-00000002", "step-00000003"]


def test_pruning_spares_everything_while_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(snapshot_at(step))
    flip(tmp_path / "checkpoints/step-00000003/model-00.safetensors", 500_000)
    assert store.prune([KeepLast(1)]).pruned == {}
    assert len(store.names()) == 3
    (tmp_path / "checkpoints/step-00000003/manifest.json").unlink()
    assert store.prune([KeepLast(1)]).pruned == {}


def test_pruning_leaves_the_checkpoints_of_another_run_alone(store: CheckpointStore) -> None:
    store.save(snapshot_at(1, run_id="another"))
    for step in (2, 3):
        store.save(snapshot_at(step))
    from .states import RUN_ID

    plan = store.prune([KeepLast(1)], run_id=RUN_ID)
    assert plan.kept["step-00000001"] == "belongs to run another"
    assert store.names() == ["step-00000001", "step-00000003"]


def test_sweep_removes_interrupted_saves_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    (tmp_path / "checkpoints/.staging-step-00000002-ab").mkdir()
    (tmp_path / "checkpoints/.staging-step-00000002-ab/x").write_text("half")
    store.quarantine(store.save(snapshot_at(2)).name, "a test")
    (tmp_path / "quarantine/step-00000002/.unbroken-tmp-1").write_text("half")
    assert store.sweep() == [".staging-step-00000002-ab", ".unbroken-tmp-1"]
    assert sorted(os.listdir(tmp_path / "quarantine/step-00000002")) == ["reason.json", "step-00000002"]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_the_newest_verified_checkpoint_is_the_newest_that_is_intact_to_the_last_byte(tmp_path: Path) -> None:
    assert newest_verified(tmp_path) is None
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot_at(step))
    assert newest_verified(tmp_path) == "step-00000002"
    flip(tmp_path / "checkpoints/step-00000002/state-00.safetensors", -1)
    assert newest_verified(tmp_path) == "step-00000001"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
