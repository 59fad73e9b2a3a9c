"""`unbroken status`: what runs are doing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.identity import read_run
from unbroken.rundir.processes import ProcessIdentity, is_alive
from unbroken.supervisor.progress import newest_listed
from unbroken.supervisor.registry import known_runs
from unbroken.supervisor.states import Snapshot, read_state

_COLOURS = {"running": "green", "done": "green", "held": "red", "lost": "red", "unreadable": "red"}
# The phase of a run that waits for space; training writes it, which nothing here may import.
_DISK_FULL = "disk-full"
_HEADER = ("RUN", "STATE", "ATTEMPT", "STEP", "BEAT", "CHECKPOINT", "DIRECTORY")


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array without TARGET, else an object.")
def status(target: str | None, as_json: bool) -> None:
    """Show what the run TARGET, a name or a directory, is doing; without TARGET, all runs that are known.

    \b
    Fields of --json (null where there is nothing to say; times are seconds since 1970):
      name, run_id, directory, command
      state            starting, running, stopping, backing-off, done, stopped, held,
                       lost (its supervisor is gone), unsupervised, unreadable
      reason           why it is in that state
      exit_code        what the run ended with
      attempt, restarts, process_id (of the attempt)
      step, phase, beat_age_seconds       the last heartbeat
      checkpoint       the newest, by name; `unbroken verify` tells whether it is intact
      hint             what to do about it
      outcome, evidence                   the verdict on the last attempt that ended
      started, changed, next_start, deadline
      host, supervisor_process_id
    """
    if target is not None:
        _show_one(describe_run(find_run(target)), as_json=as_json)
        return
    runs = [_describe_leniently(run.name, run.directory) for run in known_runs()]
    if as_json:
        output.data_json(runs)
    elif runs:
        output.table(_HEADER, [_row(run) for run in runs])
    else:
        output.note("no run is known on this machine; start one with `unbroken run -- python train.py`")


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
    }
    if run["phase"] == _DISK_FULL and run["hint"] is None and _is_held(directory):
        run["hint"] = f"free space on the disk of {directory}; training waits and goes on by itself"
    return run


def _is_held(directory: Path) -> bool:
    """Tell whether a process has the run, as far as can be known: what died waiting does not go on."""
    words = read_json(directory / layout.WRITER_FILE)
    holder = ProcessIdentity.from_json(words) if words is not None else None
    return holder is not None and is_alive(holder) is not False


def _describe_leniently(name: str, directory: Path) -> dict[str, Any]:
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
        "phase": beat.phase if beat is not None else None,
        "beat_age_seconds": round(max(0.0, time.time() - beat.wall_seconds), 3) if beat is not None else None,
    }


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        run["name"] or "",
        run["state"],
        _text(run["attempt"]),
        _text(run["step"]),
        _age(run),
        run["checkpoint"] or "",
        run["directory"],
    )


def _show_one(run: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.data_json(run)
        return
    state = output.painted(run["state"], _COLOURS.get(run["state"], "yellow"), sys.stdout)
    lines = {
        "run": run["name"],
        "directory": run["directory"],
        "command": " ".join(run["command"] or []),
        "state": f"{state} for {output.duration(time.time() - run['changed'])}" if run["changed"] else state,
        "reason": run["reason"],
        "hint": run["hint"],
        "next start": _from_now(run["next_start"]),
        "deadline": _from_now(run["deadline"]),
        "exit code": _text(run["exit_code"]),
        "attempt": _attempt(run),
        "step": f"{run['step']}, {run['phase']}, {_age(run)} ago" if run["step"] is not None else "",
        "checkpoint": run["checkpoint"],
        "last end": "\n".join([_text(run["outcome"]), *(run["evidence"] or [])]).strip(),
    }
    for name, text in lines.items():
        if text:
            output.data(f"{name:<11} " + text.replace("\n", "\n" + " " * 12))


def _attempt(run: dict[str, Any]) -> str:
    if run["attempt"] is None:
        return ""
    process = f", process {run['process_id']}" if run["process_id"] is not None else ""
    restarts = f", restarted {run['restarts']} times" if run["restarts"] else ""
    return f"{run['attempt']}{process}{restarts}"


def _age(run: dict[str, Any]) -> str:
    return output.duration(run["beat_age_seconds"]) if run["beat_age_seconds"] is not None else ""


def _from_now(moment: float | None) -> str:
    return f"in {output.duration(moment - time.time())}" if moment is not None else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value)
