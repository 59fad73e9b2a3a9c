"""The checkpoints in quarantine, a row each, with why they are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.storage.failures import failed


def list_set_aside(run_directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint that a run has set aside: its `name` then, its `step`, the `reason`.

    `step` is None if the name tells none. Nothing else of them is read. Raises StorageError.
    """
    place = run_directory / layout.QUARANTINE
    try:
        names = sorted(path.name for path in place.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise failed("list", place, error) from error
    for name in names:
        try:
            words = read_json(place / name / layout.QUARANTINE_REASON) or {}
        except StorageError as error:
            words = {"reason": error.message}
        checkpoint = str(words.get("checkpoint") or name)
        order = layout.parse_checkpoint_name(checkpoint)
        yield {
            "name": checkpoint,
            "step": order[0] if order is not None else None,
            "reason": str(words.get("reason") or "nobody wrote down why"),
        }
