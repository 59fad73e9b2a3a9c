"""`unbroken top`: what runs are doing, all the time."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from unbroken.cli import output
from unbroken.cli.describe import describe_leniently, describe_run, is_live, whole_leniently
from unbroken.cli.frames import many, one
from unbroken.cli.target import find_run
from unbroken.supervisor.registry import known_runs
from unbroken.supervisor.resources.gpu import GpuReader

_EXIT_TERMINATED = 143


@click.command()
@click.argument("target", required=False)
@click.option("--once", is_flag=True, help="Show one frame and end; so it is without a terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between two frames.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: one object, and end.")
def top(target: str | None, once: bool, interval: float, as_json: bool) -> None:
    """Watch the run TARGET, a name or a directory; without TARGET, all runs that are kept going now.

    q or Ctrl-C leaves; the runs go on.

    \b
    Fields of --json:
      time             seconds since 1970
      runs             an array; fields of each as of `unbroken status TARGET --json`, without
                       resume_certificate (null)
    """
    directory = find_run(target) if target is not None else None
    console = Console(file=sys.stdout)
    with closing(GpuReader()) as gpus:
        if as_json:
            output.data_json({"time": time.time(), "runs": _runs(directory, gpus)})
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            console.print(_frame(directory, gpus, console.width))
        else:
            _watch(console, directory, gpus, interval)


def _runs(directory: Path | None, gpus: GpuReader) -> list[dict[str, Any]]:
    if directory is not None:
        return [whole_leniently(describe_run(directory), gpus)]
    known = [describe_leniently(run.name, run.directory) for run in known_runs()]
    return [whole_leniently(run, gpus) for run in known if is_live(run)]


def _frame(directory: Path | None, gpus: GpuReader, width: int) -> Any:
    runs = _runs(directory, gpus)
    return one(runs[0]) if directory is not None else many(runs, width)


def _watch(console: Console, directory: Path | None, gpus: GpuReader, interval: float) -> None:
    # Drawn by us alone, once for each frame: a second thread would do it many times.
    live = Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with _keys(), live:
        try:
            while True:
                live.update(_frame(directory, gpus, console.width), refresh=True)
                if _is_left(interval):
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[None]:
    """Let keys come one by one, unseen, and put the terminal back, also if this process is asked to end."""
    before = termios.tcgetattr(sys.stdin)
    handler = signal.signal(signal.SIGTERM, _leave)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(_EXIT_TERMINATED)


def _is_left(seconds: float) -> bool:
    """Wait for so long, or for a key; True if it is q, or if there is no terminal any more."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False
