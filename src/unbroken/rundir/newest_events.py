"""The last events of a journal, read from its end: that of a million steps takes a hundred megabytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.rundir.journal import parse_event
from unbroken.storage.failures import failed

_PIECE_BYTES = 1 << 16


class NewestEvents:
    """The events of the journal at `path`, newest first; none if there is no file.

    At most about `limit_bytes` of it are read; `is_cut` tells, afterwards, that there is more before them.
    `read_bytes` counts what was read. Raises StorageError while it is iterated over.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self.read_bytes = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines():
            event = parse_event(line)
            if event is not None:
                yield event

    def _lines(self) -> Iterator[bytes]:
        begun = b""
        for piece in self._pieces():
            # The first line of a piece may begin in the one before it.
            begun, *whole = (piece + begun).split(b"\n")
            yield from reversed(whole)
        if not self.is_cut:
            yield begun

    def _pieces(self) -> Iterator[bytes]:
        """Yield the file in pieces, the last one first."""
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                while end > 0 and self.read_bytes < self._limit_bytes:
                    start = max(0, end - _PIECE_BYTES)
                    file.seek(start)
                    piece = file.read(end - start)
                    self.read_bytes += len(piece)
                    end = start
                    # Known before the last piece is looked at.
                    self.is_cut = end > 0 and self.read_bytes >= self._limit_bytes
                    yield piece
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise failed("read", self._path, error) from error


def last_event(path: Path, kind: str, *, limit_bytes: int = _PIECE_BYTES) -> dict[str, Any] | None:
    """Return the newest event of `kind` in the last `limit_bytes` of the journal at `path`, or None."""
    return next((event for event in NewestEvents(path, limit_bytes) if event["kind"] == kind), None)
