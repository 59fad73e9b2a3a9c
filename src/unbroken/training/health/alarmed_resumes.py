"""Which resumes in a row from one checkpoint went wrong: a small file that outlives the attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import CheckpointNotFoundError, DamagedError, StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.storage.failures import translated


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarmed:
    """The attempts whose resumes from one checkpoint went wrong, in a row.

    Those of `as_before` only did what the run had done without a resume.
    """

    attempts: tuple[int, ...] = ()
    as_before: tuple[int, ...] = ()


def count_alarmed(directory: Path, checkpoint: Checkpoint, attempt: int, *, is_repeated: bool) -> Alarmed:
    """Note that after the resume of `attempt` from `checkpoint` losses were too high; return all of them.

    With `is_repeated` an earlier attempt had the same losses, bit for bit: what it proves is what that one
    proved. It counts only if that one was a resume that counts.
    """
    found = _read(directory, checkpoint)
    if is_repeated and not found.attempts:
        found = replace(found, as_before=_with(found.as_before, attempt))
    else:
        found = replace(found, attempts=_with(found.attempts, attempt))
    write_json(
        directory / layout.ALARMED_RESUMES_FILE,
        {"checkpoint": checkpoint.name, "created": checkpoint.manifest.created, **asdict(found)},
    )
    return found


def forget_alarmed(directory: Path) -> None:
    """Note that a resume went well."""
    path = directory / layout.ALARMED_RESUMES_FILE
    with translated("remove", str(path)):
        path.unlink(missing_ok=True)


def older_good(directory: Path, step: int, *, non_finite: Sequence[str]) -> Checkpoint | None:
    """Return the newest good checkpoint of fewer than `step` steps, all of it read, or None.

    `non_finite` are patterns of the names of tensors that may hold NaN or infinity. Raises StorageError, and
    DamagedError if it cannot be known what was rolled back before.
    """
    store, rollbacks = CheckpointStore(directory), read_rollbacks(directory)
    for name in reversed(store.names()):
        try:
            found = store.get(name)
        except (CheckpointNotFoundError, DamagedError):
            continue
        reason = reason_against(found.manifest, rollbacks, non_finite=non_finite)
        if found.step < step and reason is None and store.is_intact(name):
            return found
    return None


def _read(directory: Path, checkpoint: Checkpoint) -> Alarmed:
    try:
        value = read_json(directory / layout.ALARMED_RESUMES_FILE) or {}
    except StorageError:
        # What cannot be read accuses no checkpoint: counting begins anew.
        return Alarmed()
    # The name alone would not do: steps that are counted again give it to another checkpoint.
    named = (value.get("checkpoint"), value.get("created"))
    if named != (checkpoint.name, checkpoint.manifest.created):
        return Alarmed()
    return Alarmed(attempts=_numbers(value.get("attempts")), as_before=_numbers(value.get("as_before")))


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(one for one in value if isinstance(one, int)) if isinstance(value, list) else ()


def _with(attempts: tuple[int, ...], attempt: int) -> tuple[int, ...]:
    return (*(one for one in attempts if one != attempt), attempt)
