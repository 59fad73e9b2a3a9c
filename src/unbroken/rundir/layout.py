"""Every file name in a run directory, in one place.

run.json                  identity of the run and format version of the directory
writer.lock, writer.json  who may write checkpoints (a POSIX record lock, and its holder in words)
writer.lease              renewed by that process as long as it lives, for those whom no lock can tell
supervisor.lock           held while a supervisor keeps the run going; supervisor-holder.json says by whom,
                          and supervisor.lease that it lives
supervisor.json           snapshot of what the supervisor is doing, for `status`
supervisor-plan.json      what it keeps going and how, for a supervisor that takes over
supervisor.log            what the supervisor had to say
ballast                   space kept for its records, given up when the disk is full
resources.json            what the attempt used a few seconds ago; resources-history.json its course
journal.jsonl             the supervisor's events: attempts, verdicts, decisions
checkpoints/step-00001200 one committed checkpoint; `.staging-*` is one being written
quarantine/               checkpoints that failed verification, with the reason
attempts/0001/            one process lifetime: output, events, heartbeat, last words, verdict; and
                          restoring.json from before a checkpoint is read until it is restored;
                          micro-batches.json if its script can split batches, with how small they are;
                          cell.json names its control groups while they are there; the output is out.log,
                          later out.log.gz, with out.times (when it grew) and out.start (what the archive
                          begins with, if older output was freed); ranks/ has that of each rank of torchrun;
                          alarms.jsonl is what training wants people to be told; heartbeat and last words
                          of further ranks have -rank1 and so on in their names
pins.json                 the checkpoints that no prune deletes, and why
rollbacks.json            how often, why and how far the run was rolled back, and what data it leaves out
alarmed-resumes.json      the checkpoint whose resumes went wrong lately, and in which attempts
pace.json                 how fast the run is used to go, by which a hang is told from a slow step
control/                  requests to the run: stop.json, save-now.json
latest                    symbolic link to the newest checkpoint; a convenience, never trusted
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from unbroken.storage.failures import translated

FORMAT_VERSION = 1

RUN_FILE = "run.json"
WRITER_LOCK = "writer.lock"
WRITER_FILE = "writer.json"
SUPERVISOR_LOCK = "supervisor.lock"
SUPERVISOR_HOLDER = "supervisor-holder.json"
SUPERVISOR_FILE = "supervisor.json"
PLAN_FILE = "supervisor-plan.json"
SUPERVISOR_LOG = "supervisor.log"
RESOURCES_FILE = "resources.json"
RESOURCES_HISTORY_FILE = "resources-history.json"
JOURNAL_FILE = "journal.jsonl"
CHECKPOINTS = "checkpoints"
QUARANTINE = "quarantine"
ATTEMPTS = "attempts"
STOP_FILE = "control/stop.json"
SAVE_NOW_FILE = "control/save-now.json"
LATEST_LINK = "latest"
PINS_FILE = "pins.json"
ROLLBACKS_FILE = "rollbacks.json"
ALARMED_RESUMES_FILE = "alarmed-resumes.json"
PACE_FILE = "pace.json"
BALLAST = "ballast"

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.digest"
QUARANTINE_REASON = "reason.json"
STAGING_PREFIX = ".staging-"

OUTPUT_LOG = "out.log"
RANKS = "ranks"
HEARTBEAT = "heartbeat"
ALARMS_FILE = "alarms.jsonl"
SAVE_INTERVAL_FILE = "save-interval.json"
WRITER_PROCESS = "writer-process.json"
LAST_WORDS = "last-words.json"
RESTORING_FILE = "restoring.json"
MICRO_BATCHES_FILE = "micro-batches.json"
CELL_FILE = "cell.json"
ERROR_FILE = "launcher-error.json"
EXIT_FILE = "exit.json"
VERDICT_FILE = "verdict.json"
STACKS = "stacks"

RUN_DIR_VARIABLE = "UNBROKEN_RUN_DIR"
ATTEMPT_VARIABLE = "UNBROKEN_ATTEMPT"
# How often batches are to be halved, after memory ran out.
HALVINGS_VARIABLE = "UNBROKEN_HALVINGS"

_CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def checkpoint_name(step: int, revision: int = 0) -> str:
    """Return the name of a checkpoint; `revision` tells apart states saved at one step.

    >>> checkpoint_name(1200), checkpoint_name(1200, 1)
    ('step-00001200', 'step-00001200.1')
    """
    return f"step-{step:08d}" + (f".{revision}" if revision else "")


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return `(step, revision)`, or None if `name` does not name a checkpoint.

    Names order by these numbers, never as text: step-100000000 comes after step-99999999.
    """
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    step, revision = int(match[1]), int(match[2] or 0)
    return (step, revision) if checkpoint_name(step, revision) == name else None


def shard_name(group: str, index: int = 0) -> str:
    """Return the file name of a shard, `model-00.safetensors`."""
    return f"{group}-{index:02d}.safetensors"


def attempt_directory(run_directory: Path, attempt: int) -> Path:
    """Return the directory of the attempt with number `attempt`, from 1."""
    return run_directory / ATTEMPTS / f"{attempt:04d}"


def events_file(rank: int = 0) -> str:
    """Return the name of the journal of one rank inside an attempt's directory."""
    return f"events-rank{rank}.jsonl"


def of_rank(name: str, rank: int) -> str:
    """Return the name of what stands under `name` for the first rank, for one of several.

    >>> of_rank("heartbeat", 0), of_rank("last-words.json", 2)
    ('heartbeat', 'last-words-rank2.json')
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-rank{rank}{dot}{suffix}" if rank else name


def output_archive(log: Path) -> Path:
    """Return where the output `log` is once it is closed and compressed."""
    return log.with_name(log.name + ".gz")


def output_start(log: Path) -> Path:
    """Return the file that tells at which byte of the output its archive begins, if not at the first."""
    return log.with_suffix(".start")


def output_times(log: Path) -> Path:
    """Return the file that tells when the output had grown to which size."""
    return log.with_suffix(".times")


def attempts(run_directory: Path) -> list[int]:
    """Return the numbers of all attempts, ascending. Raises StorageError if they cannot be listed."""
    directory = run_directory / ATTEMPTS
    with translated("list", str(directory)):
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted(int(name) for name in names if name.isdecimal())
