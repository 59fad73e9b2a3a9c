"""`unbroken release`: start a run again that was held."""

from __future__ import annotations

from dataclasses import replace

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import NotRunningError
from unbroken.supervisor.background import start_in_background
from unbroken.supervisor.plan import read_plan
from unbroken.supervisor.states import read_state


@click.command()
@click.argument("target", required=False)
def release(target: str | None) -> None:
    """Start the run TARGET, a name or a directory, again in the background, after it was held.

    It is started as it was before: command, options, working directory and environment. What failed
    before does not count any more.
    """
    directory = find_run(target)
    plan, state = read_plan(directory), read_state(directory)
    if plan is None or state is None or state.state != "held":
        found = f"one that is {state.state}" if state is not None else "one that no supervisor kept going"
        hint = "`unbroken revive` takes over a run that is lost, `unbroken run` starts any other"
        raise NotRunningError(f"{directory}: expected a run that is held, found {found}", hint=hint)
    said = start_in_background(replace(plan, directory=directory))
    output.note(f"unbroken: run {state.name} was started again in the background")
    if said:
        output.note(f"  {said}")
    output.note(f"  unbroken logs -f {directory}")
