"""The file of a CSVLogger: a fit that goes on appends behind the rows that the checkpoint knows of."""

from __future__ import annotations

import os
from typing import Any

import keras

# The rest is of the open file, which each process opens for itself.
KEPT = frozenset({"keys"})


def has_file(callback: Any) -> bool:
    """Tell whether `callback` writes such a file."""
    return isinstance(callback, keras.callbacks.CSVLogger)


def file_size(callback: Any) -> int:
    """Return the bytes written so far."""
    path = callback.filename
    return os.path.getsize(path) if os.path.exists(path) else 0


def go_on_with_file(callback: Any, size_bytes: int) -> None:
    """Drop the rows that were written behind a checkpoint, and have the callback append to the others.

    To be called before the callback begins: it would empty the file.
    """
    if os.path.exists(callback.filename):
        with open(callback.filename, "r+b") as file:
            file.truncate(min(size_bytes, file_size(callback)))
    callback.append = True
