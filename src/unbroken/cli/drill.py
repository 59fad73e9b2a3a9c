"""`unbroken drill`: kill and resume a script on purpose, and compare."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from unbroken.cli import output, pages
from unbroken.drill.drill import Wishes, drill
from unbroken.drill.page import page
from unbroken.drill.plans import DEFAULT_KILLS, DEFAULT_STEPS, parse_kill
from unbroken.drill.report import as_json
from unbroken.drill.stages import Observation
from unbroken.drill.verdict import Verdict, verdict
from unbroken.errors import UsageError
from unbroken.rundir.process_tree import become_subreaper
from unbroken.supervisor.launch import check_command

_SHOW_SECONDS = 0.2
_COLOURS = {"proven": "green", "undecided": "yellow"}


@click.command("drill", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=DEFAULT_STEPS,
    show_default=True,
    metavar="N",
    help="How many steps to train.",
)
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    default=DEFAULT_KILLS,
    show_default=True,
    metavar="K",
    help="How often to kill.",
)
@click.option(
    "--at",
    multiple=True,
    metavar="STEP[:MOMENT][:SIGNAL]",
    help="Kill there instead, such as 20:in-save:SIGTERM; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses other kills.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A process that makes no step for so long hangs.",
)
@click.option("--observe", is_flag=True, help="The script does not use unbroken: watch it from outside.")
@click.option(
    "--resume-args",
    metavar="TEXT",
    help="With --observe: added to COMMAND to resume, such as '--resume last.pt'.",
)
@click.option(
    "--share",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="PATH",
    help="With --observe: not copied, for the script only reads it; may be repeated.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep all that is written, here."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page.")
@click.option("--json", "as_json_wanted", is_flag=True, help="JSON: one object.")
def drill_command(  # noqa: PLR0913 - one for each option
    *,
    command: tuple[str, ...],
    steps: int,
    kills: int,
    at: tuple[str, ...],
    seed: int,
    timeout: float,
    observe: bool,
    resume_args: str | None,
    share: tuple[Path, ...],
    keep: Path | None,
    html: Path | None,
    as_json_wanted: bool,
) -> None:
    """Kill and resume COMMAND on purpose; prove that it trains as if nothing had happened, bit for bit.

    \b
    unbroken drill -- python train.py
    unbroken drill --steps 100 --at 17:in-save --at 60:SIGTERM -- python -m lab.fit --lr 0.1

    It runs in a temporary directory: the run directory of the script is not touched. What differs after
    a resume is named, and put back to prove that it is the cause.

    With --observe the script is any PyTorch script that resumes by itself. It works in copies of this
    directory, so give it relative paths.

    \b
    unbroken drill --observe --resume-args "--resume last.pt" --share data -- python train.py

    \b
    moments: in-step, after-step, in-save, in-evaluation, end-of-epoch; otherwise after-step
    signals: SIGKILL, SIGTERM, SIGINT; otherwise SIGKILL

    \b
    Fields of --json:
      verdict ("proven", "not-exact", "undecided", "failed"), exit_code, headline, details [text],
      command, seed, observed, resume_arguments [text], steps, components (compared at the last step),
      processes [began_at, reached, kill {step, moment, signal}, killed, exit_code, seconds],
      missed [step, moment, signal], restored (processes that went on from a checkpoint),
      divergence {process, began_at, step, between_epochs, batch, batch_of (step that the batch is of),
        metrics {name: {reference, other}}, gradients, components [name], rates {reference, other},
        not_restored [name], rates_not_restored {reference, other}},
      unkept {name: step} (objects in no part that differed after a resume), notes [text],
      suspects [name, in_no_part, components [name]], causes [name], trials, repeatable,
      noise {of_training, first_step, batch, gradients, rates, metrics {name: distance},
        components {name: step}}, hash_order, distances {name: distance},
      failure, output (the end of what the failed process printed), directory (with --keep)

    Exit codes: 0 proven, 1 not exact, undecided or failed, 2 no step was recorded.
    """
    check_command(command)
    wishes = Wishes(
        steps=steps,
        kills=kills,
        seed=seed,
        at=tuple(map(parse_kill, at)),
        timeout_seconds=timeout,
        observation=_observation(observe=observe, resume_args=resume_args, share=share),
    )
    if html is not None:
        pages.check_place(html)
    become_subreaper()
    with _place(keep) as root, _ended_by_sigterm():
        found = drill(command, wishes, root, environment=os.environ, progress=_Progress())
    told = verdict(found)
    if html is not None:
        pages.write(html, page(found, told))
    if as_json_wanted:
        output.data_json(as_json(found, told, None if keep is None else str(keep.absolute())))
    else:
        _show(told)
    click.get_current_context().exit(told.exit_code)


def _observation(*, observe: bool, resume_args: str | None, share: tuple[Path, ...]) -> Observation | None:
    if not observe:
        if resume_args is not None or share:
            raise UsageError(
                "--resume-args, --share: expected --observe with them",
                hint="add --observe if the script does not use unbroken.Run; a run needs neither",
            )
        return None
    try:
        arguments = tuple(shlex.split(resume_args or ""))
    except ValueError as error:
        raise UsageError(f"--resume-args {resume_args}: {error}", hint="quote it as in a shell") from error
    # Compared with what is found below the directory, so `../lab/data` must not keep its dots.
    shared = tuple(Path(os.path.abspath(path)) for path in share)
    return Observation(directory=Path.cwd(), resume_arguments=arguments, shared=shared)


def _show(told: Verdict) -> None:
    first, _, rest = told.headline.partition(":")
    output.data(f"{output.painted(first, _COLOURS.get(told.outcome, 'red'), sys.stdout)}:{rest}")
    for line in told.details:
        output.data(f"  {line}")


@contextmanager
def _place(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="unbroken-drill-") as place:
            yield Path(place)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep}: expected an empty directory or none", hint="choose another one")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, unwind as Ctrl-C does, so that nothing is left."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """One line for each phase on stderr; on a terminal it also counts the steps."""

    def __init__(self) -> None:
        self._phase, self._shown = "", 0.0

    def begin(self, phase: str) -> None:
        self._phase = phase
        self.steps(0)

    def steps(self, count: int) -> None:
        if sys.stderr.isatty() and (not count or time.monotonic() > self._shown + _SHOW_SECONDS):
            self._shown = time.monotonic()
            print(f"\r\x1b[Kunbroken: {self._phase}: step {count}", end="", file=sys.stderr, flush=True)

    def end(self, what: str) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        output.note(f"unbroken: {self._phase}: {what}")
