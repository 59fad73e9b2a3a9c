"""What goes wrong beside the writing is told, and leaves nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from unbroken.checkpoint import writer
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StorageFullError
from unbroken.storage.base import Space
from unbroken.storage.memory import MemoryStorage

from .states import snapshot_at


def test_an_error_while_digesting_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))

    def fails(data: object) -> str:
        raise MemoryError

    monkeypatch.setattr(writer, "digest", fails)
    with pytest.raises(MemoryError):
        store.save(snapshot_at(2))
    assert store.storage.list("checkpoints") == ["step-00000001"]


def test_where_no_thread_can_be_had_the_digests_are_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert CheckpointStore(tmp_path).save(snapshot_at(1)).verify().is_intact


@pytest.mark.parametrize(
    "space", [Space(free_bytes=1_000_000, free_files=100), Space(free_bytes=10**9, free_files=2)]
)
def test_a_save_without_the_space_for_it_writes_nothing(space: Space) -> None:
    class Small(MemoryStorage):
        def space(self) -> Space:
            return space

    storage = Small()
    with pytest.raises(StorageFullError, match=r"expected 1,2.* bytes and .* files to be free"):
        CheckpointStore(storage).save(snapshot_at(1))
    assert storage.list() == []
