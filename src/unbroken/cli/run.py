"""`unbroken run`: start a command and keep it going."""

from __future__ import annotations

import re
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import RUNS_FOLDER, absolute
from unbroken.cli.viewer import Viewer
from unbroken.errors import UsageError
from unbroken.supervisor.launch import check_command, launch
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.restart_policy import RestartPolicy

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--name", help="What to call the run; otherwise as the script is called.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help=f"Its directory; otherwise {RUNS_FOLDER}/NAME here."
)
@click.option("--detach", is_flag=True, help="Return at once instead of showing the output.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take to save when it is asked to stop.",
)
@click.option(
    "--backoff",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The pause before the first restart; it doubles with each failure in a row, to 10 minutes.",
)
@click.option("--max-restarts", type=click.IntRange(min=0), metavar="N", help="Hold after N restarts in all.")
def run(
    command: tuple[str, ...],
    name: str | None,
    run_dir: Path | None,
    detach: bool,
    grace: float,
    backoff: float,
    max_restarts: int | None,
) -> None:
    """Start COMMAND and keep it going: restart it by the cause of its end, stop when that is pointless.

    \b
    unbroken run -- python train.py
    unbroken run --detach --name big -- torchrun --nproc-per-node 2 train.py

    It runs in a session of its own, with its output in the run directory: closing the terminal ends
    only the view of it. Ctrl-C asks it to save and stop, a second Ctrl-C kills it.

    Exit codes: 0 done, 75 stopped with the state saved: run it again, 78 held: a human is needed,
    143 stopped without a word about saving. A script that fails after its training is complete ends
    the run with its own code.
    """
    check_command(command)
    if name is not None and (_NOT_IN_A_NAME.search(name) or name.startswith(".") or not name):
        raise UsageError(
            f"--name {name!r}: expected letters, digits, dots, dashes and underscores",
            hint="use --run-dir for a place, --name for what the run is called",
        )
    directory = absolute(run_dir if run_dir is not None else Path(RUNS_FOLDER) / (name or name_for(command)))
    plan = Plan(
        directory=directory,
        command=command,
        name=name,
        grace_seconds=grace,
        policy=RestartPolicy(base_seconds=backoff, max_restarts=max_restarts),
    )
    if detach:
        launch(plan)
        output.note(_how_to_look(directory))
        return
    viewer = Viewer(directory, grace_seconds=grace)
    supervisor = launch(plan)
    output.note(f"unbroken: run directory {directory}")
    click.get_current_context().exit(viewer.show(supervisor))


def name_for(command: tuple[str, ...]) -> str:
    """Return what to call a run of `command`: its script or module, else its program.

    >>> name_for(("python", "-u", "src/train.py", "--lr", "1")), name_for(("python", "-m", "lab.fit"))
    ('train', 'fit')
    """
    script = next((Path(part).stem for part in command if part.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[command.index("-m") + 1].rpartition(".")[2]
    name = _NOT_IN_A_NAME.sub("-", script or Path(command[0]).stem).strip(".-")
    return name or "run"


def _how_to_look(directory: Path) -> str:
    return (
        f"unbroken: it runs in the background; run directory {directory}\n"
        f"  unbroken status {directory}\n"
        f"  unbroken logs -f {directory}\n"
        f"  unbroken stop {directory}"
    )
