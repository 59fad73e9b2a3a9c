"""`unbroken doctor`: can training go on from a checkpoint, and how exactly?"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.readiness import advise_on_machine
from unbroken.cli.target import is_run, open_target
from unbroken.cli.values import printable
from unbroken.errors import EXIT_DAMAGED, EXIT_ERROR, StorageError
from unbroken.inspection import place
from unbroken.inspection.detect import CheckpointReader
from unbroken.inspection.doctor import Advice, examine
from unbroken.inspection.locate import locate_checkpoint
from unbroken.inspection.neighbours import advise
from unbroken.inspection.run_neighbours import advise_on_run
from unbroken.inspection.summary import summarize
from unbroken.inspection.suspicious import advise_on_values
from unbroken.storage.probe import Probe, probe
from unbroken.supervisor.grace import HINT, is_too_short, last_save_seconds
from unbroken.supervisor.host.machine import look
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
    checkpoint), or RUN:NAME. Headers are read; tensors are only with --values. Of a run its disk is tried
    out, in a directory that is removed again, and this machine is looked at.
    Exits with 0 if nothing is in the way, with 1 if something is, with 3 if it is damaged.

    \b
    Fields of --json:
      path, format, advice [severity ("error", "warning" or "note"), text, evidence, remedy],
      disk (of a run; null if nothing can be written there): directory, file_system, free_bytes, total_bytes,
        free_files (null: no limit), sync_seconds, has_direct_io, has_links,
        locks ("hold", "absent", "ignored"), replaces_full_directories, clock_ahead_seconds
    """
    reader = open_target(target)
    found = [*examine(reader, world_size=world_size), *advise(reader)]
    if with_values and not reader.problems:
        found += advise_on_values(reader)
    is_exact = all(one.severity == "note" for one in found)
    run = _look_at_run(reader)
    found += run.advice
    if as_json:
        advice = [dataclasses.asdict(one) for one in found]
        disk = None if run.disk is None else dataclasses.asdict(run.disk)
        output.data_json({"path": str(reader.path), "format": reader.format, "advice": advice, "disk": disk})
    else:
        output.data(printable(f"{reader.path}  {reader.format}"))
        if run.disk is not None:
            output.data(f"its disk: {place.in_words(run.disk)}")
        for one in found:
            _show(one)
        if is_exact:
            output.data("nothing is in the way: training can go on from it exactly")
    if any(one.severity == "error" for one in found):
        click.get_current_context().exit(EXIT_DAMAGED if reader.problems else EXIT_ERROR)


@dataclass(slots=True)
class _Run:
    """What surrounds a checkpoint of a run; nothing does one of another library."""

    disk: Probe | None = None
    advice: list[Advice] = field(default_factory=list)


def _look_at_run(reader: CheckpointReader) -> _Run:
    directory, found = reader.path.absolute().parent.parent, _Run()
    if not is_run(directory):
        return found
    try:
        found.advice += advise_on_run(directory, reader.path.name)
    except StorageError as error:
        found.advice.append(_unreadable(error))
    found.advice += _of_the_grace(directory)
    try:
        found.disk = probe(directory)
    except StorageError as error:
        found.advice.append(_unwritable(error))
    else:
        found.advice += place.advise_on_place(found.disk, save_bytes=reader.size_bytes)
    environment: dict[str, Any] = summarize(locate_checkpoint(reader.path))["environment"]
    found.advice += advise_on_machine(look(), environment)
    return found


def _unreadable(error: StorageError) -> Advice:
    return Advice(
        severity="note",
        text="what else the run has cannot be looked at",
        evidence=error.message,
        remedy=error.hint,
    )


def _unwritable(error: StorageError) -> Advice:
    return Advice(
        severity="error",
        text="nothing can be written where the run is: it cannot go on there",
        evidence=error.message,
        remedy=error.hint,
    )


def _of_the_grace(directory: Path) -> list[Advice]:
    try:
        plan = read_plan(directory)
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
