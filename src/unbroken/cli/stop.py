"""`unbroken stop`: ask a run to save and stop, and wait until it has."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.describe import describe_run
from unbroken.cli.target import find_run
from unbroken.errors import NotRunningError, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.control import request_stop
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.processes import ProcessIdentity, is_alive
from unbroken.supervisor.states import Snapshot, read_state

_LOOK_SECONDS = 0.05
# The supervisor needs up to a minute to prove that a killed tree is gone.
_BEYOND_DEADLINE_SECONDS = 90.0


@click.command()
@click.argument("target", required=False)
@click.option("--now", is_flag=True, help="Kill it at once, without saving.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long it may take to save before it is killed; otherwise what `run --grace` said.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: one object, when the run has stopped.")
def stop(target: str | None, now: bool, timeout: float | None, as_json: bool) -> None:
    """Ask the run TARGET, a name or a directory, to save and stop, and wait until it has.

    It is an error (1) if the run is not running. A request that is there already and leaves less time, such
    as the notice of a cloud, keeps its time; the run then counts as stopped by you, and is not run again.

    \b
    Fields of --json: those of `unbroken status --json`, of the run as it ended.
    """
    directory = find_run(target)
    state = _running(directory)
    seconds = 0.0 if now else state.grace_seconds if timeout is None else timeout
    seconds = ask_to_stop(directory, state.supervisor, reason="unbroken stop", seconds=seconds)
    if not now:
        output.note(
            f"run {state.name}: asked to save and stop {_by_when(seconds)}{_last_save(directory, seconds)}"
        )
    ended = _wait(directory, seconds + _BEYOND_DEADLINE_SECONDS)
    if ended is None:
        beyond = output.duration(_BEYOND_DEADLINE_SECONDS)
        raise UnbrokenError(
            f"run {state.name}: it has not stopped, {beyond} beyond its time",
            hint=f"`unbroken status {directory}` shows what it waits for",
        )
    if as_json:
        output.data_json(describe_run(directory))
    output.note(f"run {ended.name}: {ended.state}: {ended.reason}")


def _by_when(seconds: float) -> str:
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
    return f"within {output.duration(seconds)}, until {until}"


def _last_save(directory: Path, seconds: float) -> str:
    """Return how long the last save took, if that is known: in words, with a warning if it is too long."""
    numbers = layout.attempts(directory)
    path = layout.attempt_directory(directory, max(numbers, default=0)) / layout.HEARTBEAT
    beat = read_heartbeat(path)
    if beat is None or not beat.save_seconds:
        return ""
    is_short = "; that is too short for one" if seconds < beat.save_seconds else ""
    return f" (the last save took {output.duration(beat.save_seconds)}{is_short})"


def ask_to_stop(directory: Path, supervisor: ProcessIdentity, *, reason: str, seconds: float) -> float:
    """Ask for a stop within `seconds`, and wake the supervisor so that it looks at once.

    Returns how many seconds there are: fewer if an earlier request leaves less time.
    """
    deadline = time.time() + seconds
    try:
        standing = request_stop(directory, reason=reason, deadline_seconds=deadline)
        return max(0.0, seconds - (deadline - (standing.deadline_seconds or deadline)))
    finally:
        # Also when the disk is full and the file cannot be written: the signal alone asks, too.
        _wake(supervisor)


def _wake(supervisor: ProcessIdentity) -> None:
    if not is_alive(supervisor):
        # On another host: it looks at the file by itself, a little later.
        return
    with suppress(ProcessLookupError, PermissionError):
        # Not SIGTERM: under an engine that would be a preemption.
        os.kill(supervisor.process_id, signal.SIGINT)


def _running(directory: Path) -> Snapshot:
    state = read_state(directory)
    if state is None:
        raise NotRunningError(
            f"{directory}: no supervisor ever kept this run going",
            hint="stop a script that was started by itself with Ctrl-C or SIGTERM",
        )
    if state.state == "lost" and state.leader is not None and is_alive(state.leader):
        raise NotRunningError(
            f"run {state.name}: its supervisor is gone, but process {state.leader.process_id} still runs",
            hint=f"`unbroken revive {directory}` takes it over, then it can be stopped",
        )
    if not state.is_live:
        raise NotRunningError(
            f"run {state.name}: it is not running ({state.state}: {state.reason})",
            hint="`unbroken status` lists the runs that are known",
        )
    return state


def _wait(directory: Path, seconds: float) -> Snapshot | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = read_state(directory)
        if state is not None and not state.is_live:
            return state
        time.sleep(_LOOK_SECONDS)
    return None
