"""What a finished run directory may hold; everything else is a leftover."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout

_CHECKPOINT = r"step-\d{8,}(\.\d+)?"
_CHECKPOINT_FILE = rf"({re.escape(layout.MANIFEST)}|{re.escape(layout.MANIFEST_DIGEST)}|[\w-]+\.safetensors)"
_OUTPUT = Path(layout.OUTPUT_LOG)
_ATTEMPT_FILES = (
    layout.OUTPUT_LOG,
    layout.output_archive(_OUTPUT).name,
    layout.output_start(_OUTPUT).name,
    layout.output_times(_OUTPUT).name,
    layout.STACKS,
    layout.HEARTBEAT,
    layout.ALARMS_FILE,
    layout.SAVE_INTERVAL_FILE,
    layout.LAST_WORDS,
    layout.EXIT_FILE,
    layout.VERDICT_FILE,
    layout.events_file(),
)
_RUN_FILES = (
    layout.RUN_FILE,
    layout.WRITER_LOCK,
    layout.SUPERVISOR_LOCK,
    layout.SUPERVISOR_FILE,
    layout.SUPERVISOR_LOG,
    layout.PLAN_FILE,
    layout.RESOURCES_FILE,
    layout.RESOURCES_HISTORY_FILE,
    layout.PACE_FILE,
    layout.ROLLBACKS_FILE,
    layout.ALARMED_RESUMES_FILE,
    layout.JOURNAL_FILE,
    layout.LATEST_LINK,
)


def _any(names: tuple[str, ...]) -> str:
    return "|".join(re.escape(name) for name in names)


# Locks stay; who held them, requests, and everything with a dot in front must be gone.
_KNOWN = re.compile(
    "|".join(
        (
            _any(_RUN_FILES),
            rf"{layout.CHECKPOINTS}(/{_CHECKPOINT}(/{_CHECKPOINT_FILE})?)?",
            rf"{layout.QUARANTINE}(/{_CHECKPOINT}(-\d+)?(/{re.escape(layout.QUARANTINE_REASON)})?)?",
            rf"{layout.QUARANTINE}/{_CHECKPOINT}(-\d+)?/{_CHECKPOINT}(/{_CHECKPOINT_FILE})?",
            rf"{layout.ATTEMPTS}(/\d{{4,}}(/({_any(_ATTEMPT_FILES)}))?)?",
            rf"{layout.ATTEMPTS}/\d{{4,}}/{layout.STACKS}/rank\d+-\d+\.txt",
            re.escape(os.path.dirname(layout.STOP_FILE)),
        )
    )
)


def stray_files(directory: Path) -> list[str]:
    """Return what is in the run directory of a finished run and should not be, by relative path."""
    return sorted(path for path in _entries(directory) if _KNOWN.fullmatch(path) is None)


def damaged_checkpoints(directory: Path) -> list[str]:
    """Return the names of checkpoints that are not intact to the last byte."""
    store = CheckpointStore(directory)
    return [name for name in store.names() if not store.get(name).verify().is_intact]


def _entries(directory: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(folder, name), directory)
