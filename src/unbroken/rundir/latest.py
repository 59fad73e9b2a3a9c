"""The link `latest`, for people."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from unbroken.rundir import layout


def point_latest(directory: Path, name: str) -> None:
    """Let `latest` in the run directory lead to the checkpoint `name`."""
    link = directory / layout.LATEST_LINK
    # One name for all: what a killed process left is replaced by the next, not kept for ever.
    temporary = link.with_name(f".{layout.LATEST_LINK}-new")
    # A convenience for people: a file system without symbolic links does without it.
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"{layout.CHECKPOINTS}/{name}")
        os.replace(temporary, link)
