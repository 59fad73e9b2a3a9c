"""`unbroken status`: what runs are doing."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.describe import describe_leniently, describe_run, is_live, is_written, whole
from unbroken.cli.target import find_run
from unbroken.errors import EXIT_DO_NOT_RESTART, EXIT_ERROR, EXIT_OK, EXIT_RUN_ME_AGAIN, UsageError
from unbroken.supervisor.judging.certificate import certificate_in_words, read_certificate
from unbroken.supervisor.registry import known_runs

_HEADER = ("RUN", "STATE", "ATTEMPT", "STEP", "BEAT", "CHECKPOINT", "DIRECTORY")
_CODES = {"done": EXIT_OK, "stopped": EXIT_RUN_ME_AGAIN}


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array without TARGET, else an object.")
@click.option("--check", is_flag=True, help="Tell by the exit code, too, what TARGET is doing.")
def status(target: str | None, as_json: bool, check: bool) -> None:
    """Show what the run TARGET, a name or a directory, is doing; without TARGET, all runs that are known.

    With --check the exit code is 0 while the run goes on or when it is done, 75 if it was stopped, 78 if
    it is held or lost, and 1 if nothing keeps it going and nothing trains in it.

    \b
    Fields of --json (null where there is nothing to say; times are seconds since 1970):
      name, run_id, directory, command
      state            starting, running, stopping, backing-off, done, stopped, held,
                       lost (its supervisor is gone), unsupervised, unreadable
      reason           why it is in that state
      exit_code        what the run ended with
      attempt, restarts, process_id (of the attempt)
      step, phase, beat_age_seconds       the last heartbeat
      goal_step        after this step training is done
      checkpoint       the newest, by name; `unbroken verify` tells whether it is intact
      save_interval    of save="auto": seconds, reason, cost_seconds (what a save stops training for),
                       durable_seconds (how long it takes), failures, lived_seconds (in how much
                       training), limit ("", "floor" or "ceiling")
      hint             what to do about it
      alarm            the last of this attempt's training: time, what, text, hint; not that it is over
      resume_certificate                  only with TARGET: as in `unbroken why`
      outcome, evidence                   the verdict on the last attempt that ended
      started, changed, next_start, deadline
      host, supervisor_process_id
      resources        what the attempt used at `time`, `age_seconds` ago:
        attempt, step, steps_per_second   of late
        data_wait_share                   of training's time spent waiting for batches, 0 to 1
        processes, cpu_cores, cpu_count   cores in use, and how many there are
        memory_bytes, memory_growth_bytes_per_hour
        memory_limit, memory_limit_bytes, memory_left_bytes
                                          the nearest limit: "control group" or "machine"
        disk_free_bytes, disk_size_bytes, inodes_free
        memory_full_in_seconds, disk_full_in_seconds   if they go on as they do
        alarms                            lines for people
      totals           over all attempts, only with TARGET:
        steps_per_second                  with all that was lost
        to_go_seconds                     until goal_step, at that rate
        lost_seconds, lost                in which it got no further: redoing, pauses, starting, ending;
                                          null for a command that does not use the library
      gpus             only with TARGET: index, name, utilization (0 to 1), memory_bytes,
                       memory_total_bytes, problem
    """
    if check and target is None:
        raise UsageError("--check: expected a TARGET, found none", hint="name the run that is to be checked")
    if target is not None:
        run = _describe(find_run(target))
        _show_one(run, as_json=as_json)
        if check:
            click.get_current_context().exit(_code(run))
        return
    runs = [describe_leniently(run.name, run.directory) for run in known_runs()]
    if as_json:
        output.data_json(runs)
    elif runs:
        output.table(_HEADER, [_row(run) for run in runs])
    else:
        output.note("no run is known on this machine; start one with `unbroken run -- python train.py`")


def _describe(directory: Path) -> dict[str, Any]:
    # Here, not at the top: the list of runs is to start fast.
    from unbroken.supervisor.resources.gpu import GpuReader

    with closing(GpuReader()) as gpus:
        run = whole(describe_run(directory), gpus)
    return {**run, "resume_certificate": read_certificate(directory, run["attempt"])}


def _code(run: dict[str, Any]) -> int:
    if run["state"] == "unsupervised":
        return EXIT_OK if is_written(Path(run["directory"])) else EXIT_ERROR
    return EXIT_OK if is_live(run) else _CODES.get(run["state"], EXIT_DO_NOT_RESTART)


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
    from unbroken.cli import vitals

    state = output.painted(run["state"], vitals.colour(run["state"]), sys.stdout)
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
        "attempt": vitals.attempt(run),
        "step": f"{vitals.progress(run)}, {run['phase']}, {_age(run)} ago" if run["phase"] else "",
        **vitals.lines(run),
        "checkpoint": run["checkpoint"],
        "saves": _saves(run["save_interval"]),
        "resumed": certificate_in_words(run["resume_certificate"]) if run["resume_certificate"] else "",
        "alarm": _alarm(run),
        "last end": "\n".join([_text(run["outcome"]), *(run["evidence"] or [])]).strip(),
    }
    for name, text in lines.items():
        if text:
            output.data(f"{name:<11} " + text.replace("\n", "\n" + " " * 12))


def _age(run: dict[str, Any]) -> str:
    return output.duration(run["beat_age_seconds"]) if run["beat_age_seconds"] is not None else ""


def _saves(interval: dict[str, Any] | None) -> str:
    return f"every {output.duration(interval['seconds'])}: {interval['reason']}" if interval else ""


def _alarm(run: dict[str, Any]) -> str:
    alarm = run["alarm"]
    if alarm is None:
        return ""
    ago = output.duration(time.time() - alarm["time"])
    return "\n".join(filter(None, (f"{alarm['text']} ({ago} ago)", alarm["hint"])))


def _from_now(moment: float | None) -> str:
    return f"in {output.duration(moment - time.time())}" if moment is not None else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value)
