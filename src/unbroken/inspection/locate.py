"""From a path to the checkpoints it means."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from unbroken.checkpoint.listing import list_names
from unbroken.errors import CheckpointNotFoundError, UsageError
from unbroken.rundir import layout
from unbroken.storage.base import Storage
from unbroken.storage.local import LocalStorage


class Located(NamedTuple):
    """One checkpoint directory, as a tree of a storage."""

    storage: Storage
    tree: str
    directory: Path


def is_checkpoint(path: Path) -> bool:
    """Tell whether `path` is a checkpoint directory, whole or damaged, wherever it was copied to."""
    return path.is_dir() and (
        (path / layout.MANIFEST).exists()
        or (path / layout.MANIFEST_DIGEST).exists()
        or layout.parse_checkpoint_name(path.resolve().name) is not None
    )


def locate_checkpoint(path: Path) -> Located:
    """Return the checkpoint in the directory `path`."""
    # The link `latest` resolves to the checkpoint's own name, which its manifest is held against.
    resolved = path.resolve()
    return Located(storage=LocalStorage(resolved.parent), tree=resolved.name, directory=path)


def locate_all(run_directory: Path) -> list[Located]:
    """Return all checkpoints of the run in `run_directory`, oldest first."""
    storage = LocalStorage(run_directory)
    return [
        Located(
            storage=storage,
            tree=f"{layout.CHECKPOINTS}/{name}",
            directory=run_directory / layout.CHECKPOINTS / name,
        )
        for name in list_names(storage)
    ]


def locate_in_run(run_directory: Path, name: str | None) -> Located:
    """Return the checkpoint `name` of a run, or its newest.

    Raises CheckpointNotFoundError if the run has none, UsageError if it has none of that name.
    """
    found = locate_all(run_directory)
    if not found:
        raise CheckpointNotFoundError(
            f"{run_directory}: expected a checkpoint, found none", hint="let the run save once"
        )
    if name is None:
        return found[-1]
    for located in found:
        if located.directory.name == name:
            return located
    names = ", ".join(located.directory.name for located in found)
    raise UsageError(
        f"{run_directory}: expected checkpoint {name!r}, found {names}",
        hint="`unbroken ls` lists the checkpoints of a run",
    )
