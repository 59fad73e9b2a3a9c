"""A run directory with two checkpoints and rubbish, what is done to it, and what must hold after a fault."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.retention import KeepLast, RetentionPlan
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.storage.base import TEMPORARY_PREFIX
from unbroken.storage.memory import MemoryStorage
from unbroken.testing.faults import Rule, SystemCall

from ..checkpoint.states import snapshot_at, state_at

ONE, TWO, THREE, SHARING = (f"step-{step:08d}" for step in (1, 2, 3, 12))
STAGING = ".staging-step-00000003-dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something done to a store. `spared` must still be listed after it, whatever went wrong in it."""

    act: Callable[[CheckpointStore], Any]
    is_done: Callable[[CheckpointStore], bool]
    spared: frozenset[str]
    # What it made and did not finish, it removes, unless the fault lies in the removing itself.
    cleans_up: bool


def _save(store: CheckpointStore) -> None:
    store.save(snapshot_at(3))


def _save_sharing(store: CheckpointStore) -> None:
    """Save a state whose large shard is that of the checkpoint before."""
    write_checkpoint(
        store.storage, snapshot_at(12, state=state_of(12)), SHARING, parent=store.get(TWO).manifest
    )


def state_of(step: int) -> dict[str, Any]:
    return state_at(step) if step != 12 else {**state_at(12), "model": state_at(2)["model"]}


def _prune(store: CheckpointStore) -> RetentionPlan:
    return store.prune([KeepLast(1)])


def _quarantine(store: CheckpointStore) -> None:
    store.quarantine(ONE, "a test")


def _is_aside(store: CheckpointStore) -> bool:
    return store.names() == [TWO] and (
        store.storage.list(f"quarantine/{ONE}") == ["reason.json", ONE]
        and store.storage.list(f"quarantine/{ONE}/{ONE}") != []
    )


ACTIONS = {
    "save": Action(
        act=_save,
        is_done=lambda store: store.names() == [ONE, TWO, THREE],
        spared=frozenset({ONE, TWO}),
        cleans_up=True,
    ),
    "save sharing a shard": Action(
        act=_save_sharing,
        is_done=lambda store: store.names() == [ONE, TWO, SHARING],
        spared=frozenset({ONE, TWO}),
        cleans_up=True,
    ),
    "prune": Action(
        act=_prune, is_done=lambda store: store.names() == [TWO], spared=frozenset({TWO}), cleans_up=False
    ),
    "quarantine": Action(act=_quarantine, is_done=_is_aside, spared=frozenset({TWO}), cleans_up=True),
    "sweep": Action(
        act=lambda store: store.sweep(),
        is_done=lambda store: store.storage.list("checkpoints") == store.names(),
        spared=frozenset({ONE, TWO}),
        cleans_up=False,
    ),
}


def make_template(place: Path) -> Path:
    """A run directory in which a save died, and a prune."""
    store = CheckpointStore(place)
    for step in (1, 2):
        store.save(snapshot_at(step))
    checkpoints = place / "checkpoints"
    shutil.copytree(checkpoints / TWO, checkpoints / STAGING)
    shutil.copytree(checkpoints / ONE, checkpoints / f"{TEMPORARY_PREFIX}0123")
    (checkpoints / f"{TEMPORARY_PREFIX}4567").write_bytes(b"half")
    return place


def copy_of(template: Path, place: Path, *, with_rubbish: bool) -> CheckpointStore:
    """A copy by hard links: what writes into a committed file harms the copies to come, and is found out."""
    rubbish = [] if with_rubbish else [STAGING, f"{TEMPORARY_PREFIX}*"]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place, copy_function=os.link, ignore=shutil.ignore_patterns(*rubbish))
    return CheckpointStore(place)


def unsynced(rule: Rule) -> Rule:
    """`rule` without the wait for the disk, which loses nothing here."""

    def without_waiting(call: SystemCall) -> Any:
        if call.name != "fsync":
            return rule(call)
        call_without = SystemCall(
            number=call.number, name=call.name, arguments=call.arguments, make=lambda: None
        )
        return rule(call_without)

    return without_waiting


@functools.cache
def saved_at(step: int) -> Manifest:
    """The manifest of the state at `step`: equal ones, both intact, are of equal states."""
    return CheckpointStore(MemoryStorage()).save(snapshot_at(step, state=state_of(step))).manifest


def check_listed(store: CheckpointStore, spared: frozenset[str]) -> None:
    """Everything that is listed is whole and what was saved, and nothing that had to stay is gone."""
    names = store.names()
    assert spared <= set(names)
    for name in names:
        checkpoint = store.get(name)
        assert checkpoint.verify().is_intact, name
        expected = saved_at(checkpoint.step)
        assert (checkpoint.manifest.parts, checkpoint.manifest.tensors) == (expected.parts, expected.tensors)


def check_next_start(store: CheckpointStore, place: Path) -> None:
    """It cleans up, and saves."""
    store.sweep()
    assert sorted(os.listdir(place / "checkpoints")) == store.names()
    assert list(place.rglob(f"{TEMPORARY_PREFIX}*")) == []
    assert store.sweep() == []
    assert store.save(snapshot_at(14)).name == store.names()[-1]
    assert store.latest().verify().is_intact
