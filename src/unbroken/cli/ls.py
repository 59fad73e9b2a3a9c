"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

import sys
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.cli.values import printable, shortened
from unbroken.inspection.listing import list_checkpoints
from unbroken.rundir import layout

_HEADER = ("CHECKPOINT", "STEP", "EPOCH", "SIZE", "CREATED (UTC)", "MARKS", "METRICS")


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of objects, oldest first.")
def ls(target: str | None, as_json: bool) -> None:
    """List the checkpoints of the run TARGET, a name or a directory, oldest first.

    Marks: "pinned"; and "not finite", "not validated" and "tainted", from which no run goes on by itself.
    What was found damaged is in quarantine, and so is what is tainted once the run has gone back.

    \b
    Fields of --json (null if the manifest is damaged; `problem` then says how):
      name, run_id, step, epoch, inside_epoch, created, size_bytes, learning_rates, metrics, problem,
      pinned (null if pins.json cannot be read),
      non_finite {path: how many numbers are NaN or infinite} (null if nobody looked),
      validation [passed, reason] (null if the run has no check of its own),
      tainted (by which roll-back, "" if by none; null if rollbacks.json cannot be read)
    """
    directory = find_run(target)
    rows = list_checkpoints(directory)
    if as_json:
        output.data_json(rows)
        return
    if not rows:
        output.note(f"{directory}: no checkpoint yet")
        return
    output.table(_HEADER, [_cells(row) for row in rows])
    if rows[0]["pinned"] is None:
        output.note(f"what is pinned cannot be read; see `unbroken pin {directory} --list`")
    if any(row["tainted"] is None and row["problem"] is None for row in rows):
        output.note(f"what is tainted is not known: {directory / layout.ROLLBACKS_FILE} cannot be read")
    for row in rows:
        reason = (row["validation"] or {}).get("reason", "")
        said = row["problem"] or shortened(reason) or row["tainted"]
        if said:
            output.note(f"{output.painted(row['name'], 'red', sys.stderr)}: {printable(said)}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["problem"] is not None:
        return (row["name"], "", "", "", "", _marks(row), "manifest damaged")
    return (
        row["name"],
        str(row["step"]),
        f"{row['epoch']}{' (inside)' if row['inside_epoch'] else ''}",
        output.size(row["size_bytes"]),
        row["created"][:19].replace("T", " "),
        _marks(row),
        output.metrics(row["metrics"]),
    )


def _marks(row: dict[str, Any]) -> str:
    validation = row["validation"]
    marks = {
        "pinned": row["pinned"],
        "not finite": row["non_finite"],
        "not validated": validation is not None and not validation["passed"],
        "tainted": row["tainted"],
    }
    return ", ".join(mark for mark, is_set in marks.items() if is_set)
