"""What is known of a run, as the fields that `unbroken status --json` documents."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import StorageError, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.heartbeat import DISK_FULL, read_heartbeat
from unbroken.rundir.identity import read_run
from unbroken.rundir.journal import OVER
from unbroken.rundir.newest_events import NewestEvents
from unbroken.rundir.processes import ProcessIdentity, is_alive
from unbroken.rundir.save_interval import read_save_interval
from unbroken.supervisor.progress import newest_listed
from unbroken.supervisor.resources.reading import read_reading
from unbroken.supervisor.states import Snapshot, read_state

if TYPE_CHECKING:
    from unbroken.supervisor.resources.gpu import GpuReader

# What a run may lose its time by; see `supervisor.totals.Lost`.
LOSSES = ("redoing", "pauses", "starting", "ending")
_AT_WORK = ("running", "stopping")
_ALARMS_BYTES = 1 << 16
_LIVE = (*_AT_WORK, "starting", "backing-off")


def describe_run(directory: Path) -> dict[str, Any]:
    """Return what is known of the run in `directory`, as the fields that `status --json` documents.

    Raises StorageError or NotARunError if it cannot be read.
    """
    identity, state = read_run(directory), read_state(directory)
    attempt = state.attempt if state is not None else max(layout.attempts(directory), default=None)
    run = {
        "name": identity.name if identity is not None else None,
        "run_id": identity.run_id if identity is not None else None,
        "directory": str(directory),
        **_from_state(state),
        "attempt": attempt,
        **_from_heartbeat(directory, attempt),
        "checkpoint": newest_listed(directory),
        "save_interval": _save_interval(directory, attempt),
        "alarm": _last_alarm(directory, attempt),
        "resume_certificate": None,
        "resources": _resources(directory),
        "totals": None,
        "gpus": None,
    }
    if run["hint"] is None and run["state"] == "lost":
        run["hint"] = f"`unbroken revive {directory}` takes it over, whether it still runs or not"
    if run["phase"] == DISK_FULL and run["hint"] is None and is_written(directory):
        run["hint"] = f"free space on the disk of {directory}; training waits and goes on by itself"
    if run["hint"] is None and is_current(run) and run["resources"]["alarms"]:
        run["hint"] = run["resources"]["alarms"][0]
    return run


def is_written(directory: Path) -> bool:
    """Tell whether a process trains in `directory`, as far as can be known: what died does not go on."""
    words = read_json(directory / layout.WRITER_FILE)
    holder = ProcessIdentity.from_json(words) if words is not None else None
    return holder is not None and is_alive(holder) is not False


def describe_leniently(name: str, directory: Path) -> dict[str, Any]:
    """Return what `describe_run` does; of a run that cannot be read, as much as is known without it."""
    try:
        return describe_run(directory)
    except UnbrokenError as error:
        # One run that cannot be read must not hide the others.
        unknown = {"name": name, "run_id": None, "directory": str(directory), **_from_state(None)}
        beat = _from_heartbeat(directory, None)
        return {
            **unknown,
            **beat,
            "attempt": None,
            "checkpoint": None,
            "save_interval": None,
            "alarm": None,
            "resume_certificate": None,
            "resources": None,
            "totals": None,
            "gpus": None,
            "state": "unreadable",
            "reason": error.message,
        }


def _from_state(state: Snapshot | None) -> dict[str, Any]:
    if state is None:
        names = (
            *("command", "reason", "exit_code", "restarts", "process_id", "outcome", "evidence", "hint"),
            *("started", "changed", "next_start", "deadline", "host", "supervisor_process_id"),
        )
        return {"state": "unsupervised", **dict.fromkeys(names)}
    return {
        "command": list(state.command),
        "state": state.state,
        "reason": state.reason or None,
        "exit_code": state.exit_code,
        "restarts": state.restarts,
        "process_id": state.leader.process_id if state.leader is not None else None,
        "outcome": state.outcome or None,
        "evidence": list(state.evidence),
        "hint": state.hint or None,
        "started": state.started_seconds,
        "changed": state.changed_seconds,
        "next_start": state.next_start_seconds,
        "deadline": state.deadline_seconds,
        "host": state.supervisor.host,
        "supervisor_process_id": state.supervisor.process_id,
    }


def _from_heartbeat(directory: Path, attempt: int | None) -> dict[str, Any]:
    path = layout.attempt_directory(directory, attempt or 0) / layout.HEARTBEAT
    beat = read_heartbeat(path) if attempt is not None else None
    return {
        "step": beat.step if beat is not None else None,
        "goal_step": beat.goal_step or None if beat is not None else None,
        "phase": beat.phase if beat is not None else None,
        "beat_age_seconds": round(max(0.0, time.time() - beat.wall_seconds), 3) if beat is not None else None,
    }


def _save_interval(directory: Path, attempt: int | None) -> dict[str, Any] | None:
    found = read_save_interval(layout.attempt_directory(directory, attempt or 0))
    return {**asdict(found), "reason": found.reason()} if found is not None else None


def _last_alarm(directory: Path, attempt: int | None) -> dict[str, Any] | None:
    if attempt is None:
        return None
    events = NewestEvents(layout.attempt_directory(directory, attempt) / layout.ALARMS_FILE, _ALARMS_BYTES)
    for event in events:
        if event["kind"] == "alarm" and event.get("what") != OVER:
            return {name: event.get(name) for name in ("time", "what", "text", "hint")}
    return None


def whole(run: dict[str, Any], gpus: GpuReader) -> dict[str, Any]:
    """Return what `describe_run` said of a run with what takes longer to find out.

    Raises StorageError if its journal cannot be read.
    """
    has_gpus = is_live(run) and run["host"] == os.uname().nodename
    return {
        **run,
        "totals": _totals(run),
        "gpus": gpus.read() if has_gpus else None,
    }


def whole_leniently(run: dict[str, Any], gpus: GpuReader) -> dict[str, Any]:
    """Return what `whole` does; of a run whose journal cannot be read, as much as is known without it."""
    try:
        return whole(run, gpus)
    except StorageError as error:
        return {**run, "hint": run["hint"] or error.message}


def _totals(run: dict[str, Any]) -> dict[str, Any] | None:
    from unbroken.supervisor.resources.timeline import read_timeline
    from unbroken.supervisor.resources.totals import AttemptTimes, totals

    attempts = read_timeline(Path(run["directory"]))
    if not attempts:
        return None
    now, end = time.time(), attempts[-1].ended
    if not is_live(run):
        # Of an attempt whose end nobody saw, the last heartbeat is the last that is known.
        now = end if end is not None else max(attempts[-1].started, now - (run["beat_age_seconds"] or 0.0))
    elif end is not None:
        # Between two attempts: the next one is late already.
        attempts.append(AttemptTimes(started=now))
    found = totals(attempts, step=run["step"], goal_step=run["goal_step"], now=now)
    lost = found.lost
    return {
        "steps_per_second": found.steps_per_second,
        "to_go_seconds": found.to_go_seconds if is_live(run) else None,
        "lost_seconds": round(lost.seconds, 3) if lost is not None else None,
        "lost": {name: round(getattr(lost, name), 3) for name in LOSSES} if lost is not None else None,
    }


def is_live(run: dict[str, Any]) -> bool:
    """Tell whether a supervisor keeps the run going."""
    return run["state"] in _LIVE


def is_current(run: dict[str, Any]) -> bool:
    """Tell whether the last reading of resources is of what runs now."""
    reading = run["resources"]
    return reading is not None and run["state"] in _AT_WORK and reading["attempt"] == run["attempt"]


def _resources(directory: Path) -> dict[str, Any] | None:
    reading = read_reading(directory)
    if reading is None:
        return None
    age_seconds = round(max(0.0, time.time() - reading.time), 3)
    return {**asdict(reading), "alarms": list(reading.alarms), "age_seconds": age_seconds}
