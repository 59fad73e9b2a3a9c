"""A job of Slurm: when it ends, and how it comes back into the queue."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from unbroken.supervisor.records import Records

_TIMEOUT_SECONDS = 30.0
_STATE = re.compile(r"\bJobState=([A-Z_]+)")
_END_TIME = re.compile(r"\bEndTime=(\S+)")
_NO_END = "Unknown"


def job_id(environment: Mapping[str, str]) -> str | None:
    """Return what the job is called that this process is part of, or None.

    A task of an array goes by the number of the array and its own: one of them has for a plain number
    that of the whole array, by which all tasks would be meant.

    >>> job_id({"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"})
    '70_3'
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


def restart_count(environment: Mapping[str, str]) -> int:
    """Return how often the job came back into the queue before."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def end_seconds(environment: Mapping[str, str]) -> float | None:
    """Return when the job ends, in seconds since 1970, or None if it has no limit, or there is no job.

    Raises ValueError, with the reason, if nobody knows. Asks `scontrol` where the environment does not say
    it, which takes seconds at times: only while no attempt runs, for the supervisor has no other children
    then.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return float(text)
    job = job_id(environment)
    if job is None:
        return None
    code, said = _scontrol("show", "job", job)
    if code != 0:
        raise ValueError(said.strip() or f"scontrol show job ended with code {code}")
    return parse_end_time(said)


def parse_end_time(text: str) -> float | None:
    """Return the end time in what `scontrol show job` prints, which is the machine's local time.

    None if it is not limited. Raises ValueError if there is none.

    >>> parse_end_time("StartTime=2026-01-01T00:00:00 EndTime=Unknown Deadline=N/A") is None
    True
    """
    found = _END_TIME.search(text)
    if found is None:
        raise ValueError("scontrol show job: expected an EndTime, found none")
    if found[1] == _NO_END:
        return None
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))


def _why_not(job: str) -> str | None:
    # SIGTERM is also how a person's `scancel` begins: such a job must not come back.
    code, said = _scontrol("show", "job", job)
    found = _STATE.search(said) if code == 0 else None
    return f"it is {found[1]}" if found is not None and found[1] != "RUNNING" else None


def _requeue(job: str) -> str | None:
    code, said = _scontrol("requeue", job)
    return None if code == 0 else said.strip() or f"scontrol requeue ended with code {code}"


def requeue_job(environment: Mapping[str, str], records: Records, *, has_gone_on: bool) -> None:
    """Put the job back into the queue, if the run got on in it; Slurm then ends all that still runs of it."""
    job = job_id(environment)
    if job is None:
        return
    count = restart_count(environment)
    problem = _why_not(job) if has_gone_on else "no newer checkpoint than before"
    if problem is None:
        # Before it is done: Slurm may end this process while it waits for the answer.
        records.event("requeued", job=job, restart_count=count)
        problem = _requeue(job)
    if problem is not None:
        records.event("not-requeued", job=job, restart_count=count, reason=problem)


def _scontrol(*arguments: str) -> tuple[int, str]:
    # Loaded where it is needed: most supervisors never start a program but the run's.
    import subprocess

    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            # Otherwise times come in the form that the user likes.
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, f"scontrol: {error}"
    return done.returncode, done.stdout.decode(errors="replace")
