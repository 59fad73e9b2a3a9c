"""Saves and prunes, as a process of its own: python -m tests.durability.saver DIRECTORY FIRST_STEP COUNT

Prints the name of each checkpoint when its save has returned, and on an error what it was.
"""

from __future__ import annotations

import sys
from typing import Any

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.writer import write_checkpoint

from ..checkpoint.states import snapshot_at, state_at

KEPT = 2


def state_of(step: int) -> dict[str, Any]:
    """Every fourth state has the large part of the one before, and shares its file."""
    return {**state_at(step), "model": state_at(step - 1 if step % 4 == 0 else step)["model"]}


def save(store: CheckpointStore, step: int) -> None:
    names = store.names()
    parent = store.get(names[-1]).manifest if names else None
    snapshot = snapshot_at(step, state=state_of(step))
    write_checkpoint(store.storage, snapshot, store.next_name(step), parent=parent)


def main(directory: str, first: int, count: int) -> None:
    store = CheckpointStore(directory)
    store.sweep()
    for step in range(first, first + count):
        save(store, step)
        print(f"step-{step:08d}", flush=True)
        store.prune([KeepLast(KEPT)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
