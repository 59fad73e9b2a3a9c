"""What the tests of TensorFlow's state share: to save and to restore parts, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import unbroken
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.store import CheckpointStore


def save(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **arguments: Any) -> unbroken.Run:
    with unbroken.Run(directory, resume="must", **arguments) as run:
        return run


def manifest(directory: Path) -> Manifest:
    return CheckpointStore(directory).latest().manifest
