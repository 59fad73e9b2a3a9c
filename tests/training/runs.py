"""What the tests of runs share: to step, to save, to restore, and to look at what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.last_words import LastWords, read_last_words
from unbroken.testing.faults import SystemCall


def steps(run: unbroken.Run, count: int) -> None:
    for _ in range(count):
        run.step(loss=1.0 / (run.step_count + 1))


def names(directory: Path) -> list[str]:
    return CheckpointStore(directory).names()


def words_of(directory: Path) -> LastWords:
    found = read_last_words(layout.attempt_directory(directory, layout.attempts(directory)[-1]))
    assert found is not None
    return found


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def is_commit(call: SystemCall) -> bool:
    """Tell whether `call` makes a checkpoint what it is."""
    if call.name != "rename":
        return False
    # What is deleted is renamed there, too, and quarantine has the same names.
    target = Path(call.arguments[1])
    return target.parent.name == "checkpoints" and layout.parse_checkpoint_name(target.name) is not None


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def save(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, resume="must", **parts):
        pass
