"""The checkpoints of one run: list, load, save, quarantine, prune, sweep."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.listing import list_names
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.pruning import Pruner
from unbroken.checkpoint.reader import read_into, read_manifest, read_tensors
from unbroken.checkpoint.retention import RetentionPlan, RetentionPolicy
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.checkpoint.verify import Verification, verify_checkpoint
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.errors import CheckpointNotFoundError, DamagedError, StorageError
from unbroken.rundir import layout
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.state.tensors import HostTensor
from unbroken.state.tree import Decoder
from unbroken.storage.base import Storage
from unbroken.storage.local import LocalStorage


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint; its manifest was verified when this object was made."""

    storage: Storage
    name: str
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def load(self) -> dict[str, Any]:
        """Return `part -> state` as plain values, without any framework; every byte is verified.

        Tensors are `HostTensor`: dtype, shape and bytes. Raises DamagedError.
        """
        tensors = self.load_tensors()
        decoder = Decoder(tensors.__getitem__)
        return {part: decoder.decode(entry.state) for part, entry in self.manifest.parts.items()}

    def load_tensors(self, paths: Iterable[str] | None = None) -> dict[str, HostTensor]:
        """Return `path -> tensor` for the tensors at `paths`, or all, each verified. Raises DamagedError."""
        return read_tensors(self.storage, self._tree, self.manifest, paths)

    def load_into(self, memory: Mapping[str, memoryview]) -> None:
        """Fill `memory`, by the paths of tensors, with their bytes, each verified. Raises DamagedError.

        No second copy is made: for what is large, more than a few pieces are never held beside it.
        """
        read_into(self.storage, self._tree, self.manifest, memory)

    def verify(self) -> Verification:
        """Read everything and report all that is damaged."""
        return verify_checkpoint(self.storage, self._tree)

    @property
    def _tree(self) -> str:
        return f"{layout.CHECKPOINTS}/{self.name}"


class CheckpointStore:
    """The checkpoints of the run in `directory`, or in a storage of another kind.

    CheckpointStore("runs/digits").latest().load()["model"]
    """

    def __init__(self, directory: str | os.PathLike[str] | Storage) -> None:
        self.storage: Storage = directory if isinstance(directory, Storage) else LocalStorage(directory)
        self._pruner = Pruner(self.storage)

    def names(self) -> list[str]:
        """Return the names of all committed checkpoints, oldest first, damaged ones included."""
        return list_names(self.storage)

    def get(self, name: str) -> Checkpoint:
        """Return the checkpoint `name`. Raises CheckpointNotFoundError, DamagedError, FormatVersionError."""
        if name not in self.names():
            known = ", ".join(self.names()[-3:]) or "none"
            raise CheckpointNotFoundError(
                f"{self.storage}: expected checkpoint {name!r}, found {known}",
                hint="`unbroken ls` lists the checkpoints of a run",
            )
        return Checkpoint(self.storage, name, read_manifest(self.storage, f"{layout.CHECKPOINTS}/{name}"))

    def latest(self) -> Checkpoint:
        """Return the newest checkpoint whose manifest is intact; its `is_good` tells of flaws in the state.

        Raises CheckpointNotFoundError when there is none, DamagedError when all are damaged.
        """
        damaged: DamagedError | None = None
        for name in reversed(self.names()):
            try:
                return self.get(name)
            except DamagedError as error:
                damaged = damaged or error
        if damaged is not None:
            raise damaged
        raise CheckpointNotFoundError(
            f"{self.storage}: expected a checkpoint, found none", hint="start the run and let it save once"
        )

    def next_name(self, step: int) -> str:
        """Return the name for a new checkpoint at `step`; states already saved there keep theirs."""
        taken = [layout.parse_checkpoint_name(name) for name in self.names()]
        revisions = [order[1] for order in taken if order is not None and order[0] == step]
        return layout.checkpoint_name(step, max(revisions) + 1 if revisions else 0)

    def save(self, snapshot: Snapshot, *, before_commit: Callable[[], None] = lambda: None) -> Checkpoint:
        """Write and commit `snapshot`; see `write_checkpoint`."""
        name = self.next_name(snapshot.description.step)
        manifest = write_checkpoint(self.storage, snapshot, name, before_commit=before_commit)
        self._pruner.learn(name, manifest)
        return Checkpoint(self.storage, name, manifest)

    def quarantine(self, name: str, reason: str) -> str:
        """Set the checkpoint `name` aside, with the reason, and return its new key. Nothing is deleted."""
        taken = set(self.storage.list(layout.QUARANTINE))
        places = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
        target = f"{layout.QUARANTINE}/{next(place for place in places if place not in taken)}"
        words = {"checkpoint": name, "reason": reason, "time": time.time()}
        # The reason first: what stands in quarantine is never without one.
        self.storage.write(f"{target}/{layout.QUARANTINE_REASON}", [json.dumps(words, indent=1).encode()])
        try:
            self.storage.move(f"{layout.CHECKPOINTS}/{name}", f"{target}/{name}")
        except StorageError:
            # A reason without a checkpoint says nothing; unless only the answer was lost.
            if not self.storage.list(f"{target}/{name}"):
                with suppress(StorageError):
                    self.storage.delete(target)
            raise
        return target

    def plan_prune(
        self,
        policies: Sequence[RetentionPolicy],
        *,
        run_id: str | None = None,
        is_intact: Callable[[str], bool] | None = None,
    ) -> RetentionPlan:
        """Return what `prune` would do, and delete nothing.

        Checkpoints that are pinned stay; those that are damaged, or of another run than `run_id`, are
        kept, too: they are not ours to judge. `is_intact` is asked about the newest if anything is to
        be pruned (`self.is_intact` reads all of it); without it that one is taken to be good.
        """
        return self._pruner.plan(self.names(), policies, run_id=run_id, is_intact=is_intact)

    def prune(
        self,
        policies: Sequence[RetentionPolicy],
        *,
        run_id: str | None = None,
        is_intact: Callable[[str], bool] | None = None,
    ) -> RetentionPlan:
        """Delete what no policy wants and return what was done.

        The newest checkpoint is verified first, by `is_intact` if it is given: as long as it is not
        proved intact, an older one may be the last good one, and nothing is deleted. The plan's
        `blocked` then says why, as it does if the pins of the run cannot be read.
        """
        plan = self.plan_prune(policies, run_id=run_id, is_intact=is_intact or self.is_intact)
        return self._pruner.prune(plan)

    def is_intact(self, name: str) -> bool:
        """Read all of the checkpoint `name` and tell whether every byte is what was written."""
        return verify_checkpoint(self.storage, f"{layout.CHECKPOINTS}/{name}").is_intact

    def sweep(self) -> list[str]:
        """Remove what interrupted saves and deletes left; only for the single writer of the run."""
        left = [
            name for name in self.storage.list(layout.CHECKPOINTS) if name.startswith(layout.STAGING_PREFIX)
        ]
        for name in left:
            self.storage.delete(f"{layout.CHECKPOINTS}/{name}")
        if isinstance(self.storage, LocalStorage):
            left += self.storage.sweep(layout.CHECKPOINTS)
            for place in self.storage.list(layout.QUARANTINE):
                left += self.storage.sweep(f"{layout.QUARANTINE}/{place}")
        return left


def newest_verified(directory: Path) -> str | None:
    """Return the name of the newest checkpoint in `directory` that is good, and intact to the last byte.

    One that was given up in a roll-back is not. Raises StorageError, and DamagedError if it is not known what
    was rolled back.
    """
    store, rollbacks = CheckpointStore(directory), read_rollbacks(directory)
    for name in reversed(store.names()):
        # First what costs little: a checkpoint that nothing resumes from need not be read.
        with suppress(DamagedError, CheckpointNotFoundError):
            if reason_against(store.get(name).manifest, rollbacks) is None and store.is_intact(name):
                return name
    return None
