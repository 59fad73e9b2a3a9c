"""Training scripts as processes of their own, and what their runs left."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.last_words import LastWords, read_last_words

from ..zygote import run_script

SCRIPT = Path(__file__).with_name("script.py")


def train(run_dir: Path, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run the script in a fresh process to its end, whatever that is."""
    return run_script(script, str(run_dir), *arguments, output=run_dir.parent / "output")


def step_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step events of all attempts, in the order in which they happened."""
    return [
        event
        for attempt in layout.attempts(run_dir)
        for event in read_events(layout.attempt_directory(run_dir, attempt) / layout.events_file())
        if event["kind"] == "step"
    ]


def final_digests(run_dir: Path) -> dict[str, str]:
    """Return `tensor -> digest` of the newest checkpoint."""
    tensors = CheckpointStore(run_dir).latest().manifest.tensors
    return {path: entry.digest for path, entry in tensors.items()}


def last_words(run_dir: Path) -> LastWords:
    found = read_last_words(layout.attempt_directory(run_dir, layout.attempts(run_dir)[-1]))
    assert found is not None
    return found
