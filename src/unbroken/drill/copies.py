"""Copies of a run directory, to go back to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from unbroken.rundir import layout


def copy_run(source: Path, target: Path) -> None:
    """Make `target` what `source` is, which may be nothing at all. No process may be at work in either."""
    if target.exists():
        shutil.rmtree(target)
    if not source.exists():
        return
    shutil.copytree(source, target, symlinks=True, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    # What is committed never changes, and may be large.
    if layout.parse_checkpoint_name(Path(source).parent.name) is not None:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
