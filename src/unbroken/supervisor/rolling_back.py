"""Rolling a run back by one checkpoint while nothing of it runs: where to, and the record that does it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import CheckpointNotFoundError, DamagedError, UnbrokenError
from unbroken.rundir import layout
from unbroken.supervisor import progress
from unbroken.supervisor.records import say

# What reads checkpoints and roll-backs is loaded where it is needed, which in most runs is never.
if TYPE_CHECKING:
    from unbroken.checkpoint.store import CheckpointStore
    from unbroken.rundir.rollbacks import Rollback


def older_checkpoint(directory: Path) -> str | None:
    """Return the intact checkpoint that the run is to go back to: the newest of fewer steps.

    That is, of fewer than the one that a restart goes on from; and if the run went back already and got no
    farther since, of fewer than the one that it went back to, which it may have saved anew. None if there is
    none. It reads all of it. Raises StorageError, and DamagedError if it is not known what was rolled back
    before.
    """
    from unbroken.checkpoint.store import CheckpointStore
    from unbroken.rundir.rollbacks import read_rollbacks

    store, rollbacks = CheckpointStore(directory), read_rollbacks(directory)
    good = _good(store, rollbacks)
    newest = next(good, None)
    if newest is None:
        return None
    if _is_recorded(directory, rollbacks):
        return newest[0]
    last = _without_success(rollbacks, newest[1])
    below = newest[1] if last is None else min(newest[1], last.trusted_step)
    return next((name for name, step in good if step < below and store.is_intact(name)), None)


def went_back(directory: Path, attempt: int) -> bool:
    """Tell whether the run was rolled back in `attempt`, or after it, as far as that is known."""
    if not os.path.exists(directory / layout.ROLLBACKS_FILE):
        return False
    from unbroken.rundir.rollbacks import read_rollbacks

    try:
        return any(one.attempt == attempt for one in read_rollbacks(directory))
    except UnbrokenError as error:
        say(f"whether the run was rolled back is not known: {error.message}")
        return False


def roll_back(directory: Path, back_to: str, *, reason: str, step: int | None) -> None:
    """Record that the run goes on from the checkpoint `back_to`, after its last attempt ended at `step`.

    Raises as `rundir.rollbacks.add_rollback`.
    """
    from unbroken.rundir.rollbacks import Rollback, add_rollback, read_rollbacks

    rollbacks = read_rollbacks(directory)
    if _is_recorded(directory, rollbacks):
        return
    trusted = progress.step_of(back_to)
    assert trusted is not None, f"{back_to} is no name of a checkpoint"
    add_rollback(
        directory,
        Rollback(
            decided_by="supervisor",
            reason=reason,
            attempt=max(layout.attempts(directory)),
            found_step=trusted if step is None else step,
            trusted_step=trusted,
            in_a_row=_row(rollbacks, trusted),
        ),
    )


def _is_recorded(directory: Path, rollbacks: Sequence[Rollback]) -> bool:
    """Tell whether the roll-back after the last attempt is on record already.

    A supervisor that was killed before it could say so decides once more, and is to decide the same.
    """
    newest = max(layout.attempts(directory), default=0)
    return any(one.decided_by == "supervisor" and one.attempt == newest for one in rollbacks)


def _row(rollbacks: Sequence[Rollback], trusted_step: int) -> int:
    """Return how often the run will have been rolled back for one place, by what it goes back to now."""
    last = rollbacks[-1] if rollbacks else None
    is_farther = last is not None and last.decided_by == "supervisor" and trusted_step < last.trusted_step
    return last.in_a_row + 1 if last is not None and is_farther else 1


def _without_success(rollbacks: Sequence[Rollback], newest_step: int) -> Rollback | None:
    """Return the newest roll-back if it is the supervisor's, and the run got no farther since."""
    last = rollbacks[-1] if rollbacks else None
    is_ours = last is not None and last.decided_by == "supervisor"
    return last if last is not None and is_ours and newest_step <= last.found_step else None


def _good(store: CheckpointStore, rollbacks: Sequence[Rollback]) -> Iterator[tuple[str, int]]:
    """Yield the checkpoints that a restart may go on from, by what their manifests say, newest first."""
    from unbroken.checkpoint.choosing import reason_against

    for name in reversed(store.names()):
        with suppress(DamagedError, CheckpointNotFoundError):
            manifest = store.get(name).manifest
            if reason_against(manifest, rollbacks) is None:
                yield name, manifest.step
