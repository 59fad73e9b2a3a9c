"""`unbroken doctor`: can training go on from a checkpoint, and how exactly?"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import is_run, open_target
from unbroken.cli.values import printable
from unbroken.errors import EXIT_DAMAGED, EXIT_ERROR, StorageError
from unbroken.inspection.doctor import Advice, examine
from unbroken.inspection.neighbours import advise
from unbroken.inspection.suspicious import advise_on_values
from unbroken.supervisor.grace import HINT, is_too_short, last_save_seconds
from unbroken.supervisor.plan import read_plan

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@click.command()
@click.argument("target")
@click.option("--world-size", type=click.IntRange(min=1), help="The processes that are to go on from it.")
@click.option("--values", "with_values", is_flag=True, help="Read every tensor: NaN, zeros, overflow.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def doctor(target: str, world_size: int | None, with_values: bool, as_json: bool) -> None:
    """Say what is in the way of going on from TARGET, with the evidence and what to do about it.

    TARGET is a path of a checkpoint, of any format that `unbroken inspect` shows; a run (its newest
    checkpoint), or RUN:NAME. Headers are read; tensors are only with --values.
    Exits with 0 if nothing is in the way, with 1 if something is, with 3 if it is damaged.

    \b
    Fields of --json:
      path, format, advice [severity ("error", "warning" or "note"), text, evidence, remedy]
    """
    reader = open_target(target)
    found = [*examine(reader, world_size=world_size), *advise(reader), *_of_the_grace(reader.path)]
    if with_values and not reader.problems:
        found += advise_on_values(reader)
    if as_json:
        advice = [dataclasses.asdict(one) for one in found]
        output.data_json({"path": str(reader.path), "format": reader.format, "advice": advice})
    else:
        output.data(printable(f"{reader.path}  {reader.format}"))
        for one in found:
            _show(one)
        if not found:
            output.data("nothing is in the way: training can go on from it exactly")
    if any(one.severity == "error" for one in found):
        click.get_current_context().exit(EXIT_DAMAGED if reader.problems else EXIT_ERROR)


def _of_the_grace(checkpoint: Path) -> list[Advice]:
    directory = checkpoint.parent.parent
    try:
        plan = read_plan(directory) if is_run(directory) else None
    except StorageError:
        # Whose run it is may keep its plan from others; the checkpoint is readable, and the question.
        return []
    save_seconds = last_save_seconds(directory) if plan is not None else 0.0
    if plan is None or not is_too_short(plan.grace_seconds, save_seconds):
        return []
    return [
        Advice(
            severity="warning",
            text=f"the last save took {save_seconds:.1f} s, and a stop leaves {plan.grace_seconds:g} s",
            evidence=f"heartbeat and plan in {directory}",
            remedy=HINT,
        )
    ]


def _show(advice: Advice) -> None:
    word = output.painted(advice.severity, _COLOURS[advice.severity], sys.stdout)
    output.data(f"{word}: {printable(advice.text)}")
    output.data(f"    {printable(advice.evidence)}")
    output.data(f"    -> {printable(advice.remedy)}")
