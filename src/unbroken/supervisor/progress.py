"""Progress of a run over its attempts: a verified checkpoint newer than any before."""

from __future__ import annotations

from pathlib import Path

from unbroken.checkpoint.listing import list_names
from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.storage.local import LocalStorage
from unbroken.supervisor.records import say


def newest_listed(directory: Path) -> str | None:
    """Return the newest name in the run's checkpoint folder, whether it is intact or not, or None."""
    names = list_names(LocalStorage(directory))
    return names[-1] if names else None


def newest_or(directory: Path, otherwise: str | None) -> str | None:
    """Return `newest_listed`, but `otherwise`, and say so, if the folder cannot be listed just now."""
    try:
        return newest_listed(directory)
    except StorageError as error:
        say(f"whether there is a newer checkpoint is not known: {error.message}")
        return otherwise


def newest_verified(directory: Path) -> str | None:
    """Return the newest checkpoint that is intact to the last byte, or None; it reads all of it."""
    if newest_listed(directory) is None:
        return None
    # Not at the top: what reads checkpoints is loaded when there is one.
    from unbroken.checkpoint import store

    return store.newest_verified(directory)


def is_newer(name: str | None, than: str | None) -> bool:
    """Tell whether checkpoint `name` is newer than `than`; any is newer than None."""
    return name is not None and (than is None or _order(name) > _order(than))


def step_of(name: str | None) -> int | None:
    """Return the step of a checkpoint by its name, or None."""
    order = layout.parse_checkpoint_name(name) if name is not None else None
    return order[0] if order is not None else None


def _order(name: str) -> tuple[int, int]:
    return layout.parse_checkpoint_name(name) or (-1, 0)
