"""What stands beside the newest checkpoint of a run: what was set aside, what is damaged, what is half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unbroken.inspection.doctor import Advice
from unbroken.inspection.listing import list_checkpoints, reason_against
from unbroken.inspection.set_aside import list_set_aside
from unbroken.rundir import layout
from unbroken.rundir.files import left_temporary
from unbroken.storage.failures import translated


def advise_on_run(run_directory: Path, newest: str) -> list[Advice]:
    """Return what is to be known of what a run keeps beside its checkpoint `newest`.

    Manifests are read, tensors are not. Raises StorageError if the run cannot be listed.
    """
    return [
        *_others(run_directory, newest),
        *_set_aside(run_directory),
        *_half_written(run_directory),
    ]


def _others(run_directory: Path, newest: str) -> Iterator[Advice]:
    rows = [row for row in list_checkpoints(run_directory) if row["name"] != newest]
    bad = {row["name"]: why for row in rows if (why := reason_against(row))}
    if bad:
        yield Advice(
            severity="warning" if len(bad) == len(rows) else "note",
            text=f"{len(bad)} of the {len(rows)} older ones are of no use, should this one be damaged",
            evidence=f"{list(bad)[-1]}: {list(bad.values())[-1]}",
            remedy=f"unbroken ls {run_directory}",
        )
    if not rows:
        yield Advice(
            severity="note",
            text="it is the only one: if it is damaged, the run begins anew",
            evidence=f"1 checkpoint in {run_directory / layout.CHECKPOINTS}",
            remedy="keep several, by keep= of unbroken.Run",
        )


def _set_aside(run_directory: Path) -> Iterator[Advice]:
    rows = list(list_set_aside(run_directory))
    if rows:
        yield Advice(
            severity="warning",
            text=f"{len(rows)} checkpoints were set aside: nothing resumes from them",
            evidence=f"{rows[-1]['name']}: {rows[-1]['reason']}",
            remedy=f"look for the cause, then remove {run_directory / layout.QUARANTINE}",
        )


def _half_written(run_directory: Path) -> Iterator[Advice]:
    with translated("list", str(run_directory)):
        left = [*left_temporary(run_directory), *left_temporary(run_directory / layout.CHECKPOINTS)]
    if left:
        yield Advice(
            severity="note",
            text=f"{len(left)} saves did not end, and what they wrote takes up space",
            evidence=str(left[-1]),
            remedy="nothing needs to be done: the next start of the run removes it",
        )
