"""One attempt from its start to the proof that nothing of it is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unbroken.errors import EXIT_OK, EXIT_RUN_ME_AGAIN, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.last_words import read_last_words
from unbroken.rundir.process_tree import ProcessTree, spawn
from unbroken.rundir.processes import identify
from unbroken.rundir.writers import orphaned_writer
from unbroken.supervisor.outcome import not_started
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.restart_policy import Ended
from unbroken.supervisor.stopping import StopWatch
from unbroken.supervisor.verdict import exit_status
from unbroken.supervisor.watcher import AskToStop, EndNow, Look, MakeWatcher, Started, Watcher
from unbroken.supervisor.witness import End, Witness

_LOOK_SECONDS = 0.5
_LOOK_OFTEN_SECONDS = 0.02
# Data workers and helper processes end by themselves soon after their leader.
_LINGER_SECONDS = 1.0
# One of them may have a last checkpoint to write; longer than that it hangs.
_WRITE_SECONDS = 600.0
_TERM_SECONDS = 3.0
_KILL_SECONDS = 60.0


def run_attempt(
    run_directory: Path,
    command: Sequence[str],
    attempt: int,
    *,
    stop: StopWatch,
    records: Records,
    makers: Sequence[MakeWatcher],
    known_checkpoint: str | None,
    newest_verified: Callable[[Path], str | None],
) -> Ended:
    """Run `command` as an attempt and return how it ended, once nothing of it is left.

    `known_checkpoint` is the newest one that is known already; it is not verified again.
    """
    directory = layout.attempt_directory(run_directory, attempt)
    witness = Witness(run_directory, directory)
    started = time.monotonic()
    records.show(state="starting", attempt=attempt, leader=None, next_start_seconds=None)
    try:
        leader = spawn(
            command, environment=_environment(run_directory, attempt), output=directory / layout.OUTPUT_LOG
        )
    except OSError as error:
        end, verdict = End(status=None), not_started(command[0], error)
    else:
        records.event("attempt-started", attempt=attempt, process_id=leader)
        records.show(state="running", leader=identify(leader))
        begun = Started(attempt=attempt, directory=directory, run_directory=run_directory, leader=leader)
        end = see_to_its_end(ProcessTree(leader), begun, stop, records, makers)
        verdict = witness.judge(end, is_stop_asked=stop.is_asked)
    lived_seconds = time.monotonic() - started
    records.attempt_ended(
        attempt, status=end.status, verdict=verdict, lived_seconds=lived_seconds, step=witness.step
    )
    is_over = verdict.outcome == "completed" or stop.is_asked
    is_unchanged = not witness.has_new_checkpoint
    return Ended(
        verdict=verdict,
        started_seconds=started,
        lived_seconds=lived_seconds,
        has_words=read_last_words(directory) is not None,
        made_step=witness.made_step,
        # Verifying reads all of a checkpoint: not while somebody waits for us to stop, and not twice.
        checkpoint=known_checkpoint if is_over or is_unchanged else _verified(run_directory, newest_verified),
    )


def see_to_its_end(
    tree: ProcessTree,
    started: Started,
    stop: StopWatch,
    records: Records,
    makers: Sequence[MakeWatcher],
) -> End:
    """Watch the running attempt until it ends or must be ended, and return once nothing of it is left."""
    watchers = [make(started) for make in makers]
    try:
        because = _wait(tree, started, stop, records, watchers)
    finally:
        for watcher in watchers:
            watcher.end()
    leftovers: tuple[str, ...] = ()
    if because is None and not tree.collect():
        leftovers = tuple(str(member) for member in tree.members())
    survivors = tree.end(term_seconds=_TERM_SECONDS if because is None else 0.0, kill_seconds=_KILL_SECONDS)
    if leftovers:
        records.event("leftovers-ended", processes=leftovers)
    return End(
        status=exit_status(tree.wait_status) if tree.wait_status is not None else None,
        because=because,
        leftovers=leftovers,
        survivors=tuple(survivors),
    )


def _environment(run_directory: Path, attempt: int) -> Mapping[str, str]:
    # Output that waits in a buffer is lost with its process; so is the stack of a crash in C code.
    wanted = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    ours = {layout.RUN_DIR_VARIABLE: str(run_directory), layout.ATTEMPT_VARIABLE: str(attempt)}
    return {**wanted, **os.environ, **ours}


def _wait(
    tree: ProcessTree, started: Started, stop: StopWatch, records: Records, watchers: Sequence[Watcher]
) -> EndNow | None:
    """Wait until the tree is empty or must be ended; return why it must, unless it is only leftovers."""
    ended_at: float | None = None
    while not tree.collect():
        if stop.is_overdue:
            return EndNow(because="its time to save and stop was over")
        if stop.is_asked:
            tree.ask()
        if tree.leader_ended:
            ended_at = ended_at or time.monotonic()
            is_waited_for = stop.is_asked and not _said_goodbye(tree, started.directory)
            is_writing = orphaned_writer(started.directory) is not None
            patience = _WRITE_SECONDS if is_writing else _LINGER_SECONDS
            if time.monotonic() >= ended_at + patience and not is_waited_for:
                return None
        wanted = _look(tree, started, stop, watchers)
        if wanted is not None:
            return wanted
        if stop.wait(_LOOK_OFTEN_SECONDS if tree.leader_ended else _LOOK_SECONDS):
            _announce(stop, records)
    return None


def _look(tree: ProcessTree, started: Started, stop: StopWatch, watchers: Sequence[Watcher]) -> EndNow | None:
    look = Look(
        now_seconds=time.monotonic(),
        beat=read_heartbeat(started.directory / layout.HEARTBEAT),
        is_stop_asked=stop.is_asked,
        has_leader=not tree.leader_ended,
    )
    for watcher in watchers:
        wanted = watcher.look(look)
        if isinstance(wanted, EndNow):
            return wanted
        if isinstance(wanted, AskToStop):
            stop.ask(wanted.reason, wanted.seconds)
    return None


def _announce(stop: StopWatch, records: Records) -> None:
    request = stop.request
    assert request is not None, "announced without a request"
    records.event("stop-requested", reason=request.reason, deadline=request.deadline_seconds)
    records.show(state="stopping", reason=request.reason, deadline_seconds=request.deadline_seconds)


def _said_goodbye(tree: ProcessTree, directory: Path) -> bool:
    """Tell whether the run came to its end, or only a shell around it did."""
    words = read_last_words(directory)
    if words is not None and words.ending != "running":
        return True
    assert tree.wait_status is not None, "asked before the leader ended"
    return exit_status(tree.wait_status).code in (EXIT_OK, EXIT_RUN_ME_AGAIN)


def _verified(run_directory: Path, newest_verified: Callable[[Path], str | None]) -> str | None:
    try:
        return newest_verified(run_directory)
    except UnbrokenError as error:
        # Not proved is no progress: the failures go on counting.
        say(f"the newest checkpoint could not be verified: {error.message}")
        return None
