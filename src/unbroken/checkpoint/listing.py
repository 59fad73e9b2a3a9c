"""The names of a run's checkpoints. Apart from the store, so that listing them starts fast."""

from __future__ import annotations

from unbroken.rundir import layout
from unbroken.storage.base import Storage


def list_names(storage: Storage) -> list[str]:
    """Return the names of all committed checkpoints, oldest first, damaged ones included."""
    found = [(layout.parse_checkpoint_name(name), name) for name in storage.list(layout.CHECKPOINTS)]
    return [name for _, name in sorted((order, name) for order, name in found if order is not None)]
