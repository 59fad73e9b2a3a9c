"""What a supervisor finds that takes a run over: an attempt that runs, or one that ended unseen."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.errors import NotRunningError, RunBusyError, StorageError
from unbroken.rundir import layout
from unbroken.rundir.adopted_tree import tagged
from unbroken.rundir.control import StopRequest, read_stop, replace_stop
from unbroken.rundir.files import read_json
from unbroken.rundir.processes import ProcessIdentity, boot_id, identify, identify_self, is_alive
from unbroken.supervisor.history import Begun, Past, read_past
from unbroken.supervisor.judging.verdict import Verdict
from unbroken.supervisor.states import ENDED, Snapshot, read_state, write_state

_HINTS = {
    "held": "when it is mended, `unbroken release {0}` starts it again",
    "done": "start it again with `unbroken run` if that is wanted",
    "stopped": "start it again with `unbroken run`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`begun` is the attempt whose end nobody saw, if there is one; its `leader` need not live any more.

    `is_running` tells that something of it does, `machine_restarted` that the machine was booted since.
    """

    past: Past
    begun: Begun | None = None
    leader: ProcessIdentity | None = None
    is_running: bool = False
    machine_restarted: bool = False

    def __str__(self) -> str:
        since = ", before the machine was restarted" if self.machine_restarted else ""
        if self.begun is None:
            return f"no attempt was going on{since}"
        how = "runs" if self.is_running else f"ended unseen{since}"
        return f"attempt {self.begun.attempt} {how}"


def find(directory: Path) -> Found:
    """Return what is there to be taken over in `directory`, whose supervisor's lock the caller holds.

    Raises NotRunningError if the run ended and is not to go on by itself, and RunBusyError if it cannot
    be known what runs.
    """
    snapshot = _snapshot(directory)
    past = _past(directory, snapshot)
    _refuse_ended(directory, past, snapshot)
    _refuse_elsewhere(directory, past, snapshot)
    machine_restarted = snapshot is not None and snapshot.supervisor.boot_id != boot_id()
    living = tagged(directory)
    begun = _unended(directory, past)
    if begun is None and not living:
        return Found(past=past, machine_restarted=machine_restarted)
    if begun is None:
        # Started, and killed before it could say so.
        begun = Begun(attempt=living[-1][1], started=_made(directory, living[-1][1]))
    _refuse_others(directory, living, begun.attempt)
    leader = _leader(living, begun.attempt, snapshot)
    is_running = bool(living) or (leader is not None and is_alive(leader) is True)
    return Found(
        past=past, begun=begun, leader=leader, is_running=is_running, machine_restarted=machine_restarted
    )


def is_void(request: StopRequest | None, found: Found) -> bool:
    """Tell whether a request to stop was the machine's own, which has gone and come back since."""
    if request is None:
        return False
    by_machine = request.is_preemption or request.reason.startswith("SIGTERM")
    return found.machine_restarted and by_machine


def _snapshot(directory: Path) -> Snapshot | None:
    try:
        return read_state(directory)
    except StorageError:
        # The journal and the processes tell the rest.
        return None


def _past(directory: Path, snapshot: Snapshot | None) -> Past:
    past = read_past(directory)
    # A newer start was killed before it could begin its history.
    is_newer = snapshot is not None and past.ended_as is not None
    if is_newer and snapshot is not None and snapshot.started_seconds > past.ended_at:
        return Past(last_attempt=past.last_attempt)
    return past


def _refuse_ended(directory: Path, past: Past, snapshot: Snapshot | None) -> None:
    if past.is_interrupted:
        return
    state, reason = past.ended_as, past.reason
    # A full disk may have kept the end from the journal.
    if state is None and snapshot is not None and snapshot.state in ENDED:
        state, reason = snapshot.state, snapshot.reason
    if state is not None:
        _mend(directory, past, snapshot)
        raise NotRunningError(
            f"{directory}: expected a run that goes on, found one that is {state}: {reason}",
            hint=_HINTS.get(state, _HINTS["stopped"]).format(directory),
        )


def _mend(directory: Path, past: Past, snapshot: Snapshot | None) -> None:
    """Let the snapshot say that the run ended, where its supervisor was killed just before it could."""
    ended_as = next((state for state in ENDED if state == past.ended_as), None)
    if snapshot is None or snapshot.state != "lost" or ended_as is None:
        return
    ended = replace(
        snapshot,
        state=ended_as,
        reason=past.reason,
        exit_code=past.exit_code,
        changed_seconds=past.ended_at,
        leader=None,
    )
    write_state(directory, ended)


def _refuse_elsewhere(directory: Path, past: Past, snapshot: Snapshot | None) -> None:
    if snapshot is None or snapshot.leader is None or is_alive(snapshot.leader) is not None:
        return
    # Whoever waited for the next start had seen its end.
    if past.begun is None and snapshot.attempt == past.last_attempt:
        return
    host = snapshot.leader.host
    raise RunBusyError(
        f"{directory}: its last attempt ran on {host}, and whether it still does cannot be seen from "
        f"{identify_self().host}",
        hint=f"revive it on {host}; if that machine is gone for good, start the run here with `unbroken run`",
    )


def _refuse_others(directory: Path, living: list[tuple[int, int]], attempt: int) -> None:
    others = [
        f"process {process_id} (attempt {number})" for process_id, number in living if number != attempt
    ]
    if others:
        raise RunBusyError(
            f"{directory}: expected processes of attempt {attempt} alone, found {', '.join(others)}",
            hint="end those first; nothing may run beside an attempt",
        )


def _unended(directory: Path, past: Past) -> Begun | None:
    if past.begun is not None:
        return past.begun
    newest = max(layout.attempts(directory), default=0)
    attempt = layout.attempt_directory(directory, newest)
    # Without an output file it was only about to start, or a script was started by itself.
    has_started = (attempt / layout.OUTPUT_LOG).exists() and not (attempt / layout.EXIT_FILE).exists()
    if newest <= past.last_attempt or not has_started:
        return None
    return Begun(attempt=newest, started=_made(directory, newest))


def _made(directory: Path, attempt: int) -> float:
    return layout.attempt_directory(directory, attempt).stat().st_mtime


def _leader(living: list[tuple[int, int]], attempt: int, snapshot: Snapshot | None) -> ProcessIdentity | None:
    if snapshot is not None and snapshot.attempt == attempt and snapshot.leader is not None:
        # Also if it is a zombie: that shows how it ended.
        return snapshot.leader
    known = [identity for process_id, _ in living if (identity := identify(process_id)) is not None]
    heads = [identity for identity in known if _leads_a_session(identity.process_id)]
    return min(heads or known, key=lambda identity: identity.start_ticks, default=None)


def _leads_a_session(process_id: int) -> bool:
    try:
        return os.getsid(process_id) == process_id
    except OSError:
        return False


def read_verdict(attempt_directory: Path) -> Verdict | None:
    """Return the verdict that was left with an attempt, or None if there is none that can be read."""
    try:
        value = read_json(attempt_directory / layout.VERDICT_FILE)
    except StorageError:
        return None
    return Verdict.from_json(value) if value is not None else None


def give_time_to_stop(directory: Path, seconds: float) -> None:
    """Give a run that was asked to stop `seconds` from now, if its time has run out with nobody there.

    A command that does not read the request has not even been told yet. Raises StorageError.
    """
    request = read_stop(directory)
    if request is None or request.deadline_seconds is None or request.deadline_seconds > time.time():
        return
    replace_stop(directory, replace(request, deadline_seconds=time.time() + seconds))


def is_to_go_on(directory: Path) -> bool | None:
    """Tell whether the run in `directory` should be going on, and no supervisor keeps it going.

    None if that cannot be known, since its supervisor was on another host. Raises StorageError.
    """
    snapshot = _snapshot(directory)
    past = _past(directory, snapshot)
    if past.is_interrupted:
        return True
    if snapshot is None:
        # A crash of the machine can leave it empty, or take it away.
        return past.ended_as is None and (directory / layout.PLAN_FILE).exists()
    if snapshot.is_live and is_alive(snapshot.supervisor) is None:
        return None
    return snapshot.state == "lost"
