"""What runs us: a batch system or a container engine, which owns the machine, the signals, the restarts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import UsageError

TERMINATION_LOG_VARIABLE = "UNBROKEN_TERMINATION_LOG"
_TERMINATION_LOG = "/dev/termination-log"
# What Kubernetes keeps of it.
_MESSAGE_BYTES = 4096
_LONGEST_PAUSE_SECONDS = 600.0
# An allotment that waits is paid for.
_LONGEST_PAUSE_THERE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, known by one of the `variables` that it sets for what it starts.

    `ends_by` is what ends all processes that it started, which is why nothing can be detached there.
    """

    name: str
    variables: tuple[str, ...]
    ends_by: str


_TORCHRUN = Engine(name="torchrun", variables=("TORCHELASTIC_RUN_ID",), ends_by="the rank ends")
SUBMITIT = Engine(name="submitit", variables=("SUBMITIT_EXECUTOR",), ends_by="the job's function returns")
SLURM = Engine(name="Slurm", variables=("SLURM_JOB_ID",), ends_by="the batch script ends")
KUBERNETES = Engine(
    name="Kubernetes", variables=("KUBERNETES_SERVICE_HOST",), ends_by="the container's command ends"
)
# The innermost first: it is the one that ends us.
ENGINES = (
    _TORCHRUN,
    SUBMITIT,
    Engine(name="Ray", variables=("RAY_JOB_ID", "RAY_RAYLET_PID"), ends_by="the worker ends"),
    Engine(name="SkyPilot", variables=("SKYPILOT_TASK_ID",), ends_by="the task's command ends"),
    Engine(
        name="HTCondor", variables=("_CONDOR_JOB_AD", "_CONDOR_SCRATCH_DIR"), ends_by="the job's program ends"
    ),
    SLURM,
    KUBERNETES,
)


def engine_of(environment: Mapping[str, str]) -> Engine | None:
    """Return what runs the process with this environment, or None.

    >>> engine_of({"SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}).name, engine_of({})
    ('Slurm', None)
    """
    found = (engine for engine in ENGINES if any(environment.get(name) for name in engine.variables))
    return next(found, None)


def longest_pause_seconds(engine: Engine | None) -> float:
    """Return the longest pause before a restart, in an allotment of `engine`."""
    return _LONGEST_PAUSE_THERE_SECONDS if engine is not None else _LONGEST_PAUSE_SECONDS


def check_engine(engine: Engine | None, *, detach: bool, requeue: bool, process_ids: tuple[int, int]) -> None:
    """Raise UsageError if `unbroken run` cannot do there what is wanted of it.

    `process_ids` are those of the process that is asked to run, and of its parent.
    """
    if engine is _TORCHRUN:
        raise UsageError(
            "unbroken run: expected to be started once, above torchrun, found itself in one of its ranks "
            "(TORCHELASTIC_RUN_ID is set)",
            hint="start `unbroken run -- torchrun ... train.py`; in a rank `unbroken.Run` alone is enough",
        )
    if requeue and engine is not SLURM:
        where = f"in {engine.name}, which starts jobs again itself" if engine is not None else "outside of it"
        raise UsageError(
            f"--requeue: expected a job of Slurm, found itself {where}",
            hint="leave it out, and let what started this start it again on exit code 75",
        )
    if detach and engine is not None and not _outlives_its_command(engine, process_ids):
        raise UsageError(
            f"--detach: {engine.name} ends everything when {engine.ends_by}, a detached run too",
            hint="leave it out: stay in the foreground, and close the terminal as you like",
        )


def _outlives_its_command(engine: Engine, process_ids: tuple[int, int]) -> bool:
    # In a container that serves something else, such as a notebook, there is a terminal to leave.
    process_id, parent_id = process_ids
    return engine is KUBERNETES and process_id != 1 and parent_id > 1


def leave_message(environment: Mapping[str, str], state: str, reason: str, *, hint: str) -> None:
    """Leave in what state the run is, and why, where Kubernetes looks for it, if that is what runs us."""
    text = f"{state}: {reason}\nhint: {hint}" if hint else f"{state}: {reason}"
    path = Path(environment.get(TERMINATION_LOG_VARIABLE) or _TERMINATION_LOG)
    # Kubernetes makes the file; where there is none nobody reads it.
    if environment.get(KUBERNETES.variables[0]) and path.is_file():
        with suppress(OSError):
            path.write_bytes(text.encode()[:_MESSAGE_BYTES])


def reap_strangers(own_child: int) -> None:
    """Collect what ended as a child of process 1, which inherits all orphans, and is not `own_child`."""
    if os.getpid() != 1:
        return
    with suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == own_child:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
