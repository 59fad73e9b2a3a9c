"""`unbroken attach`: the view of a run that is going on already."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.collapse import MOST_ROWS
from unbroken.cli.follow import OutputFollower, start_of_lines
from unbroken.cli.lines import OutputLines
from unbroken.cli.target import find_run
from unbroken.cli.viewer import RunView
from unbroken.errors import NotRunningError, UnbrokenError
from unbroken.rundir import layout
from unbroken.supervisor.states import Snapshot, read_state

_LOOK_SECONDS = 0.1
_LAST_LINES = 10
_EXIT_DETACHED = 130
# A service manager starts another supervisor in place of one that was killed.
_SUCCESSOR_SECONDS = 5.0


@click.command()
@click.argument("target", required=False)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    default=_LAST_LINES,
    show_default=True,
    metavar="N",
    help="Begin with the last N lines.",
)
def attach(target: str | None, tail: int) -> None:
    """Show the run TARGET, a name or a directory, as `unbroken run` in the foreground does.

    It shows output and events over all attempts until the run ends, and ends with the run's exit code.
    Ctrl-C detaches, and the run goes on; `unbroken stop` stops it.
    """
    directory = find_run(target)
    state = read_state(directory)
    if state is None or not state.is_live:
        was = f"it is {state.state}: {state.reason}" if state is not None else "nobody keeps it going"
        raise NotRunningError(
            f"{directory}: expected a run that is going on, but {was}",
            hint=f"`unbroken logs {directory}` shows its output, `unbroken run` starts it again",
        )
    try:
        click.get_current_context().exit(_show(directory, state, tail))
    except KeyboardInterrupt:
        output.note(f"unbroken: detached; the run goes on; `unbroken stop {directory}` stops it")
        click.get_current_context().exit(_EXIT_DETACHED)


def _show(directory: Path, state: Snapshot, tail: int) -> int:
    # A shell's background job has it ignored, and then nobody at the keyboard means us.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    attempt = state.attempt or max(layout.attempts(directory), default=1)
    output.note(f"unbroken: {state.name}, attempt {attempt}, {state.state}; Ctrl-C detaches")
    view = RunView(directory, attempt, start=_show_last(directory, attempt, tail))
    lost_since: float | None = None
    while True:
        # Looked at before reading, so that what was written last is not missed.
        found = read_state(directory)
        while not view.show_new():
            pass
        is_lost = found is None or not (found.may_print or found.exit_code is not None)
        lost_since = (lost_since or time.monotonic()) if is_lost else None
        if found is None or (lost_since is not None and time.monotonic() > lost_since + _SUCCESSOR_SECONDS):
            raise UnbrokenError(
                f"{directory}: its supervisor is gone, and its attempt has ended",
                hint=f"`unbroken revive {directory}` takes the run over",
            )
        if not found.is_live and found.exit_code is not None:
            return found.exit_code
        time.sleep(_LOOK_SECONDS)


def _show_last(directory: Path, attempt: int, tail: int) -> int:
    """Show the last lines that there are, and return the byte of the output behind them."""
    log = layout.attempt_directory(directory, attempt) / layout.OUTPUT_LOG
    start = start_of_lines(log, tail + MOST_ROWS)
    lines = OutputLines()
    shown, end = [], start
    for piece in OutputFollower(directory, attempt, only_one=True, start=start).new():
        end += len(piece.data) + piece.freed_bytes
        shown += lines.add(piece)
    # What is drawn over itself just now stays without an end: what comes next goes on there.
    pending = lines.pending
    for line in shown[-tail:] if tail else []:
        output.data(line.text)
    sys.stdout.write(pending)
    sys.stdout.flush()
    return end
