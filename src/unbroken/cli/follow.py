"""Reading the output of a run while it is written, over all its attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from unbroken.rundir import layout

_PIECE_BYTES = 1 << 16


class OutputFollower:
    """Hands out what attempts of the run in `directory` have written since the last look.

    It begins with attempt `first`, and with the start of its output.
    """

    def __init__(self, directory: Path, first: int, *, only_one: bool = False) -> None:
        self._directory = directory
        self._attempt = first
        self._only_one = only_one
        self._file: BinaryIO | None = None

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield `(attempt, piece)` for all that is new, in order."""
        while True:
            # Looked up before reading: once a later attempt exists, this one's output is complete.
            later = None if self._only_one else self._later()
            yield from self._rest()
            if later is None:
                return
            self.close()
            self._attempt = later

    @property
    def is_complete(self) -> bool:
        """True when nothing can follow what was read: only one attempt is wanted, and it is not the last."""
        return self._only_one and self._later() is not None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rest(self) -> Iterator[tuple[int, bytes]]:
        if self._file is None:
            path = layout.attempt_directory(self._directory, self._attempt) / layout.OUTPUT_LOG
            with suppress(FileNotFoundError, NotADirectoryError):
                self._file = path.open("rb")
        if self._file is not None:
            while piece := self._file.read(_PIECE_BYTES):
                yield self._attempt, piece

    def _later(self) -> int | None:
        return min((n for n in layout.attempts(self._directory) if n > self._attempt), default=None)


class LineSplitter:
    """Turns pieces of output into whole lines, `emit(attempt, line)`."""

    def __init__(self, emit: Callable[[int, str], None]) -> None:
        self._emit = emit
        self._attempt = 0
        self._torn = b""

    def add(self, attempt: int, piece: bytes) -> None:
        """Emit the lines that `piece` completes."""
        if attempt != self._attempt:
            self.finish()
            self._attempt = attempt
        *lines, self._torn = (self._torn + piece).split(b"\n")
        for line in lines:
            self._emit(attempt, line.decode(errors="replace"))

    def finish(self) -> None:
        """Emit a last line that has no end."""
        if self._torn:
            self._emit(self._attempt, self._torn.decode(errors="replace"))
            self._torn = b""
