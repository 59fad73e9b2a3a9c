"""The roll-backs of a run: why it went back, how far, and which data it leaves out since.

The file is a list, in order. It decides by itself what is tainted and what is skipped, so that whoever
dies between two steps of a roll-back leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from unbroken.errors import DamagedError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json

# health: what training reported was bad.      resume: resumes from there went wrong again and again.
# supervisor: attempts that went on from there ended the same way.
Decider: TypeAlias = Literal["health", "resume", "supervisor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Batches of one pass that are read and given to nobody: from number `first` to `last`, both from 0.

    `pass_index` counts the passes over loaders in the body of `epoch`, from 0.
    """

    epoch: int
    pass_index: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerRate:
    """The learning rates times `factor`, from the step after `from_step` to `until_step`."""

    factor: float
    from_step: int
    until_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """One roll-back. Of the states from before it, those after `trusted_step` steps are tainted.

    `found_step` is the step at which it was decided, in attempt `attempt`; `reason` is for people.
    `in_a_row` counts those that went back for one place, this one included: from 2 on, the one before did
    not help. `left_out_steps` are those that `windows` would have been for.
    """

    decided_by: Decider
    reason: str
    attempt: int
    found_step: int
    trusted_step: int
    windows: tuple[Window, ...] = ()
    lower_rate: LowerRate | None = None
    in_a_row: int = 1
    left_out_steps: int = 0
    # How many ranks counted the batches of `windows`.
    ranks: int = 1


def read_rollbacks(directory: Path) -> tuple[Rollback, ...]:
    """Return the roll-backs of the run in `directory`, oldest first.

    Raises StorageError if they cannot be read and DamagedError if they are none: what is tainted, or to be
    skipped, would be taken for good.
    """
    path = directory / layout.ROLLBACKS_FILE
    value = read_json(path)
    if value is None:
        return ()
    try:
        return msgspec.convert(value["rollbacks"], tuple[Rollback, ...])
    except (KeyError, msgspec.ValidationError) as error:
        raise DamagedError(
            f"{path}: expected a list of roll-backs, found {error}",
            hint="without it nobody knows which checkpoints are tainted: restore it from a copy of the run",
        ) from error


def add_rollback(directory: Path, rollback: Rollback) -> tuple[Rollback, ...]:
    """Add one, durably, and return all. Raises as `read_rollbacks`, and StorageError."""
    found = (*read_rollbacks(directory), rollback)
    write_json(directory / layout.ROLLBACKS_FILE, {"rollbacks": [msgspec.to_builtins(one) for one in found]})
    return found


def tainting(rollbacks: Sequence[Rollback], *, step: int, earlier: int) -> Rollback | None:
    """Return the roll-back that a checkpoint is tainted by, or None.

    It is of `step`, and was written when `earlier` roll-backs had been.
    """
    return next((one for one in rollbacks[earlier:] if step > one.trusted_step), None)
