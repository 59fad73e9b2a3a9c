"""`unbroken revive`: keep a run going again whose supervisor is gone."""

from __future__ import annotations

from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import EXIT_ERROR, EXIT_OK, NotRunningError, RunBusyError, UnbrokenError, UsageError


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
    from unbroken.supervisor.adoption import is_to_go_on
    from unbroken.supervisor.registry import known_runs

    code = EXIT_OK
    for run in known_runs():
        try:
            if is_to_go_on(run.directory):
                _revive(run.directory)
        except (NotRunningError, RunBusyError) as error:
            output.note(f"unbroken: {error.message}")
        except UnbrokenError as error:
            # One run that cannot be revived must not keep the others down.
            output.error(error.message, hint=error.hint)
            code = EXIT_ERROR
    return code


def _revive(directory: Path) -> None:
    from unbroken.supervisor.background import revive_in_background

    found, said = revive_in_background(directory)
    output.note(f"unbroken: run {directory} is kept going again: {found}")
    if said:
        output.note(f"  {said}")
