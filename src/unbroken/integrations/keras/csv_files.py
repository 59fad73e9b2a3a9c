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


def cut_file(callback: Any, size_bytes: int) -> None:
    """Drop the rows that were written behind a checkpoint, though the callback has opened the file."""
    if os.path.exists(callback.filename):
        os.truncate(callback.filename, min(size_bytes, file_size(callback)))
    # It looked for a header as it began, in what is gone now.
    callback.append_header = file_size(callback) == 0
