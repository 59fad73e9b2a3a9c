"""`unbroken revive`: keep a run going again whose supervisor is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import (
    EXIT_ERROR,
    EXIT_OK,
    NotRunningError,
    RunBusyError,
    StorageError,
    UnbrokenError,
    UsageError,
)
from unbroken.supervisor.host import boot

if TYPE_CHECKING:
    from unbroken.supervisor.registry import KnownRun

_TRY_AGAIN_SECONDS = 10.0


@click.command()
@click.argument("target", required=False)
@click.option("--boot", is_flag=True, help="Revive all runs of this machine that should be going on.")
def revive(target: str | None, boot: bool) -> None:
    """Start a supervisor that takes over the run TARGET, a name or a directory, from one that is gone.

    An attempt that still runs is not touched: the new supervisor goes on to watch it and learns how it
    ends. One that ended meanwhile is judged by what it left. Failures that were counted go on counting. A
    run that was held, done or stopped is not started; `unbroken release` starts one that was held.
    """
    if not boot:
        _revive(find_run(target))
        return
    if target is not None:
        raise UsageError(
            f"revive --boot {target}: expected no run beside --boot",
            hint="leave out --boot to revive one run",
        )
    click.get_current_context().exit(_revive_all())


def _revive_all() -> int:
    from unbroken.supervisor.registry import registered_runs

    left = {run: error for run in registered_runs() if (error := _try(run)) is not None}
    # Disks that are mounted late are there by and by.
    while left and boot.seconds_to_settle() > 0:
        time.sleep(_TRY_AGAIN_SECONDS)
        left = {run: error for run in left if (error := _try(run)) is not None}
    for run, error in left.items():
        if run.is_there:
            output.error(error.message, hint=error.hint)
        else:
            # Most often it was removed for good.
            output.note(f"unbroken: {error.message}")
    return EXIT_ERROR if any(run.is_there for run in left) else EXIT_OK


def _try(run: KnownRun) -> UnbrokenError | None:
    """Revive `run` if it should be going on; return what may keep it from that for only a while."""
    from unbroken.supervisor.adoption import is_to_go_on

    if not run.is_there:
        return StorageError(
            f"run {run.name} is not revived: {run.directory} is not there",
            hint=f"when it is there again, `unbroken revive {run.directory}`",
        )
    try:
        should_go_on = is_to_go_on(run.directory)
        if should_go_on is None:
            output.note(
                f"unbroken: run {run.directory} is not revived: its supervisor was on a host of another name"
            )
        elif should_go_on:
            _revive(run.directory)
    except (NotRunningError, RunBusyError) as error:
        output.note(f"unbroken: {error.message}")
    except UnbrokenError as error:
        # One run that cannot be revived must not keep the others down.
        return error
    return None


def _revive(directory: Path) -> None:
    from unbroken.supervisor.background import revive_in_background

    found, said = revive_in_background(directory)
    output.note(f"unbroken: run {directory} is kept going again: {found}")
    if said:
        output.note(f"  {said}")
