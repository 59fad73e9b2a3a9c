"""One attempt from its start to the proof that nothing of it is left."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.errors import EXIT_OK, EXIT_RUN_ME_AGAIN
from unbroken.rundir import layout
from unbroken.rundir.adopted_tree import AdoptedTree
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.last_words import read_last_words
from unbroken.rundir.process_tree import ProcessTree, spawn
from unbroken.rundir.processes import identify
from unbroken.rundir.writers import orphaned_writer
from unbroken.supervisor import memory_hints, progress
from unbroken.supervisor.adoption import Found, read_verdict
from unbroken.supervisor.asking import Asking
from unbroken.supervisor.history import Begun, ended_to_json
from unbroken.supervisor.judging.outcome import not_started
from unbroken.supervisor.judging.verdict import Verdict, exit_status
from unbroken.supervisor.judging.witness import End, Witness
from unbroken.supervisor.records import Records
from unbroken.supervisor.restart_policy import Ended
from unbroken.supervisor.rolling_back import went_back
from unbroken.supervisor.side.output_keeping import separate_ranks
from unbroken.supervisor.stopping import StopWatch
from unbroken.supervisor.watcher import AskToStop, EndNow, Look, MakeWatcher, Started, Watcher

_LOOK_SECONDS = 0.5
_LOOK_OFTEN_SECONDS = 0.02
# Data workers and helper processes end by themselves soon after their leader.
_LINGER_SECONDS = 1.0
# One of them may have a last checkpoint to write; longer than that it hangs.
_WRITE_SECONDS = 600.0
_TERM_SECONDS = 3.0
_KILL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """What all attempts of a run are watched with."""

    stop: StopWatch
    records: Records
    makers: Sequence[MakeWatcher]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """An attempt that ended."""

    attempt: int
    witness: Witness
    end: End
    verdict: Verdict
    started_seconds: float
    lived_seconds: float


def run_attempt(
    run_directory: Path, command: Sequence[str], attempt: int, *, care: Care, known_checkpoint: str | None
) -> Ended:
    """Run `command` as an attempt and return how it ended, once nothing of it is left.

    `known_checkpoint` is the newest one that is verified already, and stays so in what is returned.
    """
    stop, records = care.stop, care.records
    directory = layout.attempt_directory(run_directory, attempt)
    witness = Witness(run_directory, directory)
    started = time.monotonic()
    halvings = memory_hints.halvings_of_next(run_directory)
    records.show(state="starting", attempt=attempt, leader=None, next_start_seconds=None)
    try:
        with witness.in_cell():
            leader = spawn(
                command,
                environment=_environment(run_directory, attempt, stop.grace_seconds, halvings),
                output=directory / layout.OUTPUT_LOG,
            )
    except OSError as error:
        end, verdict = End(status=None), not_started(command[0], error)
    else:
        records.event("attempt-started", attempt=attempt, process_id=leader, **witness.before)
        records.show(state="running", reason="", hint="", leader=identify(leader))
        begun = Started(attempt=attempt, directory=directory, run_directory=run_directory, leader=leader)
        makers = [*care.makers, witness.device_users.watch]
        end = see_to_its_end(ProcessTree(leader, witness.cell), begun, stop, records, makers)
        verdict = witness.judge(end, is_stop_asked=stop.is_asked)
    seen = _Seen(
        attempt=attempt,
        witness=witness,
        end=end,
        verdict=verdict,
        started_seconds=started,
        lived_seconds=time.monotonic() - started,
    )
    return _conclude(run_directory, seen, care=care, known_checkpoint=known_checkpoint)


def adopt_attempt(
    run_directory: Path, begun: Begun, found: Found, *, care: Care, known_checkpoint: str | None
) -> Ended:
    """Watch an attempt that another supervisor started, or find out how it ended; return as `run_attempt`."""
    stop, records, attempt = care.stop, care.records, begun.attempt
    directory = layout.attempt_directory(run_directory, attempt)
    witness = Witness(run_directory, directory, begun=begun)
    # Of an earlier boot, its number is a stranger's.
    leader = None if found.machine_restarted else found.leader
    tree = AdoptedTree(run_directory, attempt, leader)
    leading = leader if found.is_running else None
    records.show(state="running", reason="", hint="", attempt=attempt, leader=leading)
    if stop.is_asked:
        _announce(stop, records)
    started = Started(
        attempt=attempt,
        directory=directory,
        run_directory=run_directory,
        leader=tree.leader,
        is_adopted=True,
    )
    # What ended is not there to be watched any more.
    makers = [*care.makers, witness.device_users.watch] if found.is_running else []
    # What the last supervisor was about to end is not watched until that is found once more.
    because = EndNow(because=begun.ended_because, kind=begun.ended_kind) if begun.ended_because else None
    end = see_to_its_end(tree, started, stop, records, makers, because=because)
    ended = time.time() if found.is_running else _last_sign_seconds(directory, begun.started)
    if end.status is None and begun.wait_status is not None:
        end = replace(end, status=exit_status(begun.wait_status))
    end = replace(end, machine_restarted=found.machine_restarted)
    seen = _Seen(
        attempt=attempt,
        witness=witness,
        end=end,
        # The last supervisor may have come as far as that, and saw more than what is left now.
        verdict=read_verdict(directory) or witness.judge(end, is_stop_asked=stop.is_asked),
        started_seconds=time.monotonic() - max(0.0, time.time() - begun.started),
        lived_seconds=max(0.0, ended - begun.started),
    )
    return _conclude(run_directory, seen, care=care, known_checkpoint=known_checkpoint)


def _conclude(run_directory: Path, seen: _Seen, *, care: Care, known_checkpoint: str | None) -> Ended:
    """Record how an attempt ended."""
    witness, verdict = seen.witness, seen.verdict
    witness.close()
    ended = Ended(
        verdict=verdict,
        started_seconds=seen.started_seconds,
        lived_seconds=seen.lived_seconds,
        has_words=read_last_words(layout.attempt_directory(run_directory, seen.attempt)) is not None,
        made_step=witness.made_step,
        step=witness.step,
        checkpoint=known_checkpoint,
        parts=memory_hints.parts_of_next(run_directory, seen.attempt, cause=verdict.cause),
        went_back=went_back(run_directory, seen.attempt),
    )
    care.records.attempt_ended(
        seen.attempt,
        status=seen.end.status,
        verdict=verdict,
        lived_seconds=seen.lived_seconds,
        step=witness.step,
        record=ended_to_json(ended),
    )
    return ended


def see_to_its_end(
    tree: ProcessTree | AdoptedTree,
    started: Started,
    stop: StopWatch,
    records: Records,
    makers: Sequence[MakeWatcher],
    *,
    because: EndNow | None = None,
) -> End:
    """Watch the running attempt until it ends or must be ended, and return once nothing of it is left.

    With `because` it is known already that it must.
    """
    watchers = [make(started) for make in makers]
    try:
        because = because or _wait(tree, started, stop, records, watchers)
    finally:
        for watcher in watchers:
            watcher.end()
    if because is not None:
        # Known to whoever takes over, should this supervisor not outlive what it ends.
        records.event(
            "attempt-ending", attempt=started.attempt, because=because.because, ended_kind=because.kind
        )
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
        leader=tree.leader or None,
    )


def _environment(run_directory: Path, attempt: int, grace_seconds: float, halvings: int) -> Mapping[str, str]:
    # Output that waits in a buffer is lost with its process; so is the stack of a crash in C code; so is a
    # save that a launcher gives half a minute.
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_seconds)),
        "TORCHELASTIC_ERROR_FILE": str(layout.attempt_directory(run_directory, attempt) / layout.ERROR_FILE),
    }
    ours = {layout.RUN_DIR_VARIABLE: str(run_directory), layout.ATTEMPT_VARIABLE: str(attempt)}
    if halvings:
        ours[layout.HALVINGS_VARIABLE] = str(halvings)
    return {**wanted, **separate_ranks(os.environ, run_directory, attempt), **os.environ, **ours}


def _not_served(started: Started, stop: StopWatch) -> str:
    """Say that a request to stop was not obeyed in time, what the attempt did instead, and what is lost."""
    over = "its time to save and stop was over"
    beat = read_heartbeat(started.directory / layout.HEARTBEAT)
    if beat is None or stop.request is None:
        return over
    # Where nobody can tell, no step is called lost.
    unknown = layout.checkpoint_name(beat.step)
    saved = progress.step_of(progress.newest_or(started.run_directory, unknown)) or 0
    lost = f"; {beat.step - saved} steps are lost" if beat.step > saved else ""
    return f"{over}: {stop.request.reason}; it was {beat.phase} at step {beat.step}{lost}"


def _wait(
    tree: ProcessTree | AdoptedTree,
    started: Started,
    stop: StopWatch,
    records: Records,
    watchers: Sequence[Watcher],
) -> EndNow | None:
    """Wait until the tree is empty or must be ended; return why it must, unless it is only leftovers."""
    ended_at: float | None = None
    asking = Asking(tree, started.directory)
    while not tree.collect():
        if stop.is_overdue:
            return EndNow(because=_not_served(started, stop))
        if stop.is_asked:
            asking.ask(stop)
        if tree.leader_ended:
            if ended_at is None:
                ended_at = time.monotonic()
                _note_exit(tree, started, records)
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
    if ended_at is None:
        _note_exit(tree, started, records)
    return None


def _note_exit(tree: ProcessTree | AdoptedTree, started: Started, records: Records) -> None:
    """Write down at once how the leader ended: whoever has collected it is the only one who knows."""
    if tree.wait_status is not None:
        records.event("leader-ended", attempt=started.attempt, wait_status=tree.wait_status)


def _look(
    tree: ProcessTree | AdoptedTree, started: Started, stop: StopWatch, watchers: Sequence[Watcher]
) -> EndNow | None:
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
            stop.ask(wanted.reason, wanted.seconds, is_preemption=wanted.is_preemption)
    return None


def _announce(stop: StopWatch, records: Records) -> None:
    request = stop.request
    assert request is not None, "announced without a request"
    records.event(
        "stop-requested",
        reason=request.reason,
        deadline=request.deadline_seconds,
        is_preemption=request.is_preemption,
    )
    records.show(state="stopping", reason=request.reason, deadline_seconds=request.deadline_seconds)


def _said_goodbye(tree: ProcessTree | AdoptedTree, directory: Path) -> bool:
    """Tell whether the run came to its end, or only a shell around it did."""
    words = read_last_words(directory)
    if words is not None and words.ending != "running":
        return True
    # Of an adopted one nobody may know; those of its tree that are left have the time to say it.
    return tree.wait_status is not None and exit_status(tree.wait_status).code in (EXIT_OK, EXIT_RUN_ME_AGAIN)


def _last_sign_seconds(directory: Path, started: float) -> float:
    """Return when an attempt last did anything that was left, in seconds since 1970."""
    beat = read_heartbeat(directory / layout.HEARTBEAT)
    output = directory / layout.OUTPUT_LOG
    written = output.stat().st_mtime if output.exists() else started
    return max(written, beat.wall_seconds if beat is not None else started)
