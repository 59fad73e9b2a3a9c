"""`unbroken save`: a checkpoint now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.describe import describe_run, is_live, is_written
from unbroken.cli.target import find_run
from unbroken.errors import NotRunningError, SaveFailedError
from unbroken.rundir import layout
from unbroken.rundir.control import request_save

_LOOK_SECONDS = 0.05


@click.command()
@click.argument("target", required=False)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the checkpoint is there.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait; the request stays.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def save(target: str | None, wait: bool, timeout: float, as_json: bool) -> None:
    """Ask the run TARGET, a name or a directory, for a checkpoint now, and print its name.

    It is taken when the body of the loop that runs now is done. It is an error (1) if the run is not
    training, does not use the library, or ends before it has saved.

    \b
    Fields of --json:
      name, directory
      checkpoint       the new one, by name; null with --no-wait
      step             of the checkpoint
      seconds          from the request until it was there
    """
    directory = find_run(target)
    before = _training(directory)
    asked = time.monotonic()
    request_save(directory)
    checkpoint = _wait(directory, before, asked + timeout) if wait else None
    seconds = round(time.monotonic() - asked, 3)
    place = layout.parse_checkpoint_name(checkpoint) if checkpoint is not None else None
    if as_json:
        output.data_json(
            {
                "name": before["name"],
                "directory": str(directory),
                "checkpoint": checkpoint,
                "step": place[0] if place is not None else None,
                "seconds": seconds if wait else None,
            }
        )
    elif checkpoint is not None:
        output.data(checkpoint)
    else:
        output.note(f"run {before['name']}: asked for a checkpoint; `unbroken ls {directory}` shows it")


def _training(directory: Path) -> dict[str, Any]:
    """Return what is known of the run, which is one that takes requests."""
    run = describe_run(directory)
    if is_live(run) and run["phase"] is None:
        raise NotRunningError(
            f"run {run['name']}: no heartbeat: its script does not use the library, or has only started",
            hint="a script saves on request inside `with unbroken.Run(...)`",
        )
    if not is_written(directory):
        raise NotRunningError(
            f"run {run['name']}: nothing trains in it now ({run['state']})",
            hint=f"`unbroken status {directory}` tells what it does",
        )
    return run


def _wait(directory: Path, before: dict[str, Any], until: float) -> str:
    while True:
        # Looked at before the listing, so that what was saved last is not missed.
        has_ended = not is_written(directory)
        run = describe_run(directory)
        if run["checkpoint"] is not None and _is_new(run["checkpoint"], before):
            return str(run["checkpoint"])
        if has_ended:
            raise SaveFailedError(
                f"run {run['name']}: its attempt ended before it had saved ({run['state']})",
                hint=f"`unbroken status {directory}` tells why",
            )
        if time.monotonic() >= until:
            age = output.duration(run["beat_age_seconds"] or 0.0)
            raise SaveFailedError(
                f"run {run['name']}: no new checkpoint yet; it beat last {age} ago, in {run['phase']}",
                hint="the request stays; a save is taken between two batches, or at the next `run.step`",
            )
        time.sleep(_LOOK_SECONDS)


def _is_new(checkpoint: str, before: dict[str, Any]) -> bool:
    """Tell whether a checkpoint has all the steps that were complete when it was asked for.

    One that was already being written may have fewer.
    """
    step, revision = layout.parse_checkpoint_name(checkpoint) or (-1, 0)
    known = layout.parse_checkpoint_name(before["checkpoint"] or "") or (-1, 0)
    return (step, revision) > known and step >= (before["step"] or 0)
