"""A run that begins from a checkpoint of another run of ours: its parts, and none of its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.ranks import of_rank
from unbroken.checkpoint.reader import read_manifest
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import StateMismatchError, UnhealthyError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.state.choices import Choices
from unbroken.state.handlers import GRADIENTS
from unbroken.storage.local import LocalStorage
from unbroken.training.comparison import Origin
from unbroken.training.foreign_checkpoint import CheckpointAt
from unbroken.training.part import Part
from unbroken.training.randomness import RNG_PART
from unbroken.training.restoration import Restoration
from unbroken.training.start_report import StartReport, start_report

_NOTES = (
    "random generators of the process are not taken from another run: they go on as the script set them",
    "nor is the position in the data: the run begins between epochs, which it counts from 0",
)


def is_of_a_run(path: Path) -> bool:
    """Tell whether `path` is a run directory or a checkpoint of ours."""
    return (path / layout.MANIFEST).is_file() or (path / layout.CHECKPOINTS).is_dir()


def start_from_run(source: Path, parts: Sequence[Part], choices: Choices, hint: str) -> StartReport:
    """Fill `parts` with their states in `source`, a run (its newest checkpoint) or a checkpoint, if all fits.

    Raises StateMismatchError, DamagedError, CheckpointNotFoundError; UnhealthyError for a run whose newest
    checkpoint is not to go on from; UsageError for one that was saved inside a step.
    """
    where, checkpoint = _opened(source)
    checkpoint = of_rank(checkpoint, 0)
    manifest = checkpoint.manifest
    if any(isinstance(entry.state, dict) and GRADIENTS in entry.state for entry in manifest.parts.values()):
        raise UsageError(
            f"{where}: expected a checkpoint between two steps, found one inside a step, with gradients",
            hint="name another checkpoint of that run",
        )
    kept = {name: entry for name, entry in manifest.parts.items() if name != RNG_PART}
    # A choice that the other run made once is still to be made here.
    seen = msgspec.structs.replace(manifest, parts=kept, choices={})
    mine = [part for part in parts if part.name != RNG_PART]
    restoration = Restoration(mine, replace(checkpoint, manifest=seen), choices, Origin(called=where))
    try:
        restored = restoration.run()
    except StateMismatchError as error:
        raise StateMismatchError(error.message, hint=hint) from error
    inside = [f"it lies inside epoch {manifest.position.epoch}"] if manifest.position.inside_epoch else []
    notes = [f"step {manifest.step} is that of the other run", *inside, *_NOTES]
    return start_report(where, restored, notes, step=manifest.step)


def _opened(source: Path) -> tuple[str, Checkpoint]:
    if (source / layout.MANIFEST).is_file():
        # Wherever it was copied to.
        storage, tree = LocalStorage(source.resolve().parent), source.resolve().name
        return str(source), CheckpointAt(storage, tree, read_manifest(storage, tree))
    store, rollbacks = CheckpointStore(source), read_rollbacks(source)
    newest = store.latest()
    reason = reason_against(newest.manifest, rollbacks)
    if reason is not None:
        raise UnhealthyError(
            f"{source}: expected a newest checkpoint to go on from, found {newest.name}, which is {reason}",
            hint=f"name the one that is meant, {source}/{layout.CHECKPOINTS}/{newest.name} or an older one",
        )
    return f"{source} ({newest.name})", newest
