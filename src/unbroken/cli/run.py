"""`unbroken run`: start a command and keep it going."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.quantities import size
from unbroken.cli.target import RUNS_FOLDER, absolute
from unbroken.cli.viewer import Viewer, say
from unbroken.errors import UsageError
from unbroken.rundir.identity import open_run
from unbroken.supervisor import surroundings
from unbroken.supervisor.background import start_in_background
from unbroken.supervisor.grace import in_words
from unbroken.supervisor.hangs.hang_policy import HangPolicy
from unbroken.supervisor.host.engines import check_engine, engine_of, longest_pause_seconds
from unbroken.supervisor.host.tmux import check_tmux, open_window
from unbroken.supervisor.launch import check_command, launch
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.restart_policy import RestartPolicy
from unbroken.supervisor.side.notifications import wanted_targets

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--name", help="What to call the run; otherwise as the script is called.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help=f"Its directory; otherwise {RUNS_FOLDER}/NAME here."
)
@click.option("--detach", is_flag=True, help="Return at once instead of showing the output.")
@click.option("--tmux", is_flag=True, help="The same, with a tmux window on the output.")
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
@click.option(
    "--whole-batches",
    is_flag=True,
    help="Do not split batches, as an earlier start did after memory had run out.",
)
@click.option(
    "--notify",
    multiple=True,
    metavar="TARGET",
    help="A URL, cmd:COMMAND or the path of a program that is told of what happens to the run; several times "
    "for several. Otherwise the lines of UNBROKEN_NOTIFY.",
)
@click.option(
    "--log-limit",
    callback=size,
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="The most that the output of an attempt may take on the disk; the oldest half is freed then.",
)
@click.option(
    "--hang-after",
    metavar="SECONDS",
    help="End a run that makes no step for so long, or `off`: only say so; by itself limits are learned.",
)
@click.option("--max-restarts", type=click.IntRange(min=0), metavar="N", help="Hold after N restarts in all.")
@click.option(
    "--notices",
    type=click.Choice(["auto", "aws", "gcp", "azure", "alibaba", "tencent", "off"]),
    default="auto",
    show_default=True,
    help="The cloud whose preemption notices are watched; by itself the one that the firmware names.",
)
@click.option("--requeue", is_flag=True, help="Slurm: put the job back into the queue after a preemption.")
def run(  # noqa: PLR0913, PLR0917 - one for each option
    command: tuple[str, ...],
    name: str | None,
    run_dir: Path | None,
    detach: bool,
    tmux: bool,
    grace: float,
    backoff: float,
    hang_after: str | None,
    max_restarts: int | None,
    notices: str,
    requeue: bool,
    whole_batches: bool,
    notify: tuple[str, ...],
    log_limit: int,
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
    if tmux:
        check_tmux()
    engine = engine_of(os.environ)
    check_engine(engine, detach=detach or tmux, requeue=requeue, process_ids=(os.getpid(), os.getppid()))
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
        working_directory=os.getcwd(),
        environment=surroundings.kept(os.environ),
        grace_seconds=grace,
        notices=notices,
        requeue=requeue,
        hang=_hang_policy(hang_after),
        policy=RestartPolicy(
            base_seconds=backoff, cap_seconds=longest_pause_seconds(engine), max_restarts=max_restarts
        ),
        whole_batches=whole_batches,
        notify=wanted_targets(notify),
        log_limit_bytes=log_limit,
    )
    if detach or tmux:
        said = start_in_background(plan)
        output.note(_how_to_look(directory, grace))
        if said:
            output.note(f"unbroken: {said}")
        if tmux:
            session = open_window(directory, open_run(directory).name)
            output.note(f"unbroken: `tmux attach -t {session}` shows its output")
        return
    viewer = Viewer(directory, grace_seconds=grace)
    supervisor = launch(plan)
    say(f"unbroken: run directory {directory}; {in_words(directory, grace)}")
    click.get_current_context().exit(viewer.show(supervisor))


def _hang_policy(hang_after: str | None) -> HangPolicy:
    if hang_after is None:
        return HangPolicy()
    if hang_after == "off":
        return HangPolicy(is_enforced=False)
    try:
        seconds = float(hang_after)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"--hang-after {hang_after}: expected seconds above 0, or off",
            hint="leave it out to have limits learned",
        )
    return HangPolicy(step_seconds=seconds)


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


def _how_to_look(directory: Path, grace: float) -> str:
    return (
        f"unbroken: it runs in the background; run directory {directory}; {in_words(directory, grace)}\n"
        f"  unbroken status {directory}\n"
        f"  unbroken logs -f {directory}\n"
        f"  unbroken stop {directory}"
    )
