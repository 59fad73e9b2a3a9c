"""`unbroken prune`: delete the checkpoints of a run that no policy wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from unbroken.checkpoint.pins import read_pins
from unbroken.checkpoint.pruning import PINS_ARE_BEING_CHANGED
from unbroken.checkpoint.retention import (
    KeepBest,
    KeepDaily,
    KeepEverySteps,
    KeepHourly,
    KeepLast,
    RetentionPlan,
    RetentionPolicy,
)
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import EXIT_DAMAGED, EXIT_ERROR, UsageError
from unbroken.inspection.listing import list_checkpoints
from unbroken.rundir import layout
from unbroken.rundir.identity import open_run
from unbroken.rundir.lock import RunLock

_COUNT = click.IntRange(min=1)
_HEADER = ("CHECKPOINT", "SIZE", "ACTION", "REASON")


@click.command()
@click.argument("run")
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N.")
@click.option("--keep-best", type=_COUNT, metavar="N", help="Keep the N with the best value of --metric.")
@click.option("--metric", metavar="NAME", help="What --keep-best goes by.")
@click.option(
    "--mode", type=click.Choice(["max", "min"]), help="Which values are best; otherwise the highest."
)
@click.option("--keep-hourly", type=_COUNT, metavar="N", help="Keep the newest of each of the last N hours.")
@click.option("--keep-daily", type=_COUNT, metavar="N", help="Keep the newest of each of the last N days.")
@click.option("--keep-every-steps", type=_COUNT, metavar="N", help="Keep the first of each N steps.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of objects, oldest first.")
def prune(run: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Delete the checkpoints of RUN, a name or a directory, that none of the given policies wants.

    What at least one policy wants is kept, and so are the newest checkpoint, those that are pinned,
    damaged or of another run. The newest one is read first: if it is damaged, nothing is deleted (3).
    It is an error (78) while another process writes to the run.

    \b
    Fields of --json (null if the manifest is damaged):
      name, step, size_bytes, pruned (with --dry-run: would be), reason
    """
    policies = _policies(**options)
    directory = find_run(run)
    # To look needs nobody's leave.
    with nullcontext() if dry_run else _alone(directory):
        listed = list_checkpoints(directory)
        plan = _prune(directory, policies, dry_run=dry_run)
    rows = [_fields(row, plan) for row in listed if row["name"] in {**plan.kept, **plan.pruned}]
    if as_json:
        output.data_json(rows)
    elif rows:
        output.table(_HEADER, [_cells(row, dry_run) for row in rows])
    sizes = [row["size_bytes"] for row in rows if row["pruned"]]
    words = "would prune" if dry_run else "pruned"
    output.note(f"{directory}: {words} {len(sizes)} of {len(rows)} checkpoints, {output.size(sum(sizes))}")
    if plan.blocked is not None:
        output.note(f"nothing may be pruned: {plan.blocked}")
        code = EXIT_ERROR if plan.blocked == PINS_ARE_BEING_CHANGED else EXIT_DAMAGED
        click.get_current_context().exit(code)


def _prune(directory: Path, policies: list[RetentionPolicy], *, dry_run: bool) -> RetentionPlan:
    store, run_id = CheckpointStore(directory), open_run(directory).run_id
    # Said before the newest checkpoint is read, which may take a while.
    read_pins(store.storage)
    if dry_run:
        return store.plan_prune(policies, run_id=run_id, is_intact=store.is_intact)
    return store.prune(policies, run_id=run_id)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep trainers and supervisors out of the run in this block. Raises RunBusyError if one is in it."""
    # A supervisor, too: between two attempts nobody writes, and the next one would find the run busy.
    supervisor = RunLock(
        directory / layout.SUPERVISOR_LOCK,
        directory / layout.SUPERVISOR_HOLDER,
        doing="keeps this run going",
    )
    writer = RunLock(directory / layout.WRITER_LOCK, directory / layout.WRITER_FILE)
    # The writer first: that is who people look for.
    writer.acquire()
    try:
        supervisor.acquire()
        try:
            yield
        finally:
            supervisor.release()
    finally:
        writer.release()


def _policies(
    keep_last: int | None,
    keep_best: int | None,
    metric: str | None,
    mode: str | None,
    keep_hourly: int | None,
    keep_daily: int | None,
    keep_every_steps: int | None,
) -> list[RetentionPolicy]:
    if (keep_best is None) != (metric is None) or (mode is not None and keep_best is None):
        raise UsageError(
            "expected --keep-best and --metric together, with or without --mode",
            hint="such as `--keep-best 1 --metric accuracy`, or `--keep-best 1 --metric loss --mode min`",
        )
    found: list[RetentionPolicy] = []
    if keep_last is not None:
        found.append(KeepLast(keep_last))
    if keep_best is not None and metric is not None:
        found.append(KeepBest(keep_best, metric, mode="min" if mode == "min" else "max"))
    if keep_hourly is not None:
        found.append(KeepHourly(keep_hourly))
    if keep_daily is not None:
        found.append(KeepDaily(keep_daily))
    if keep_every_steps is not None:
        found.append(KeepEverySteps(keep_every_steps))
    if not found:
        raise UsageError(
            "expected at least one policy that says what to keep, found none",
            hint="such as `--keep-last 3`; `unbroken prune --help` lists them, --dry-run deletes nothing",
        )
    return found


def _fields(row: dict[str, Any], plan: RetentionPlan) -> dict[str, Any]:
    name = row["name"]
    return {
        "name": name,
        "step": row["step"],
        "size_bytes": row["size_bytes"],
        "pruned": name in plan.pruned,
        "reason": plan.pruned.get(name) or plan.kept[name],
    }


def _cells(row: dict[str, Any], dry_run: bool) -> tuple[str, ...]:
    size = "" if row["size_bytes"] is None else output.size(row["size_bytes"])
    action = ("would prune" if dry_run else "pruned") if row["pruned"] else "kept"
    return (row["name"], size, action, row["reason"])
