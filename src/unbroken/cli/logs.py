"""`unbroken logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.follow import LineSplitter, OutputFollower
from unbroken.cli.target import find_run
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.supervisor.states import read_state

_LOOK_SECONDS = 0.1


@click.command()
@click.argument("target", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on, over all attempts, until the run ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="The attempt; otherwise the newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def logs(target: str | None, follow: bool, attempt: int | None, as_json: bool) -> None:
    """Show the output of the run TARGET, a name or a directory.

    With --json each line of output is an object: `attempt` (its number) and `line` (without its end).
    """
    directory = find_run(target)
    numbers = layout.attempts(directory)
    if attempt is not None and attempt not in numbers:
        raise UsageError(
            f"{directory}: expected attempt {attempt}, found {len(numbers)} attempts",
            hint="`unbroken status` shows the number of the newest",
        )
    first = attempt if attempt is not None else max(numbers, default=1)
    # Only with -f does it go on into later attempts, and not if one was asked for.
    follower = OutputFollower(directory, first, only_one=attempt is not None or not follow)
    splitter = LineSplitter(lambda number, line: output.data_json({"attempt": number, "line": line}))
    write = splitter.add if as_json else _write
    count = _follow(directory, follower, write) if follow else _copy(follower, write)
    splitter.finish()
    if not count:
        output.note("no output yet")


def _write(_: int, piece: bytes) -> None:
    sys.stdout.buffer.write(piece)


def _copy(follower: OutputFollower, write: Callable[[int, bytes], None]) -> int:
    count = 0
    for attempt, piece in follower.new():
        write(attempt, piece)
        count += len(piece)
    sys.stdout.flush()
    return count


def _follow(directory: Path, follower: OutputFollower, write: Callable[[int, bytes], None]) -> int:
    count = 0
    while True:
        # Looked at before reading, so that the last words of a run that ends now are not missed.
        state, is_complete = read_state(directory), follower.is_complete
        count += _copy(follower, write)
        if is_complete or state is None or not state.is_live:
            return count
        time.sleep(_LOOK_SECONDS)
