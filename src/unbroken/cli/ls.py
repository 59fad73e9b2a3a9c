"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

import sys
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.inspection.listing import list_checkpoints

_HEADER = ("CHECKPOINT", "STEP", "EPOCH", "SIZE", "CREATED (UTC)", "METRICS")


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of objects, oldest first.")
def ls(target: str | None, as_json: bool) -> None:
    """List the checkpoints of the run TARGET, a name or a directory, oldest first.

    \b
    Fields of --json (null if the manifest is damaged; `problem` then says how):
      name, run_id, step, epoch, inside_epoch, created, size_bytes, learning_rates, metrics, problem
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
    for row in rows:
        if row["problem"] is not None:
            output.note(f"{output.painted(row['name'], 'red', sys.stderr)}: {row['problem']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["problem"] is not None:
        return (row["name"], "", "", "", "", "manifest damaged")
    return (
        row["name"],
        str(row["step"]),
        f"{row['epoch']}{' (inside)' if row['inside_epoch'] else ''}",
        output.size(row["size_bytes"]),
        row["created"][:19].replace("T", " "),
        output.metrics(row["metrics"]),
    )
