"""When an output had grown to which size: noted while it is written, so that its lines have a time later.

One note a line, seconds since 1970 and size in bytes: `1764509931.25 4096`.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_NOTES = 50_000


class OutputTimes:
    """Notes the times of an output in the file at `path`, in about 1.5 MB at most.

    When there are too many notes every second one is dropped, and from then on they are twice as far apart.
    Raises OSError when a note cannot be written; the lines it would have covered get the next one's time.
    """

    def __init__(self, path: Path, *, most_notes: int = MOST_NOTES) -> None:
        self._path = path
        self._most_notes = most_notes
        self._interval_seconds = 0.0
        self._not_before = 0.0
        there = _read(path)
        self._count = len(_parse(there))
        # Its writer died, or the disk became full, in the middle of a note.
        self._is_torn = not there.endswith(b"\n") and bool(there)

    def note(self, size_bytes: int, *, is_last: bool = False) -> None:
        """Note that the output has `size_bytes` now; the last note is made however soon it comes."""
        if time.monotonic() < self._not_before and not is_last:
            return
        self._not_before = time.monotonic() + self._interval_seconds
        self._append(f"{time.time():.2f} {size_bytes}\n".encode())
        self._count += 1
        if self._count > self._most_notes:
            self._thin_out()

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        line = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = os.write(descriptor, line) < len(line)
        finally:
            os.close(descriptor)

    def _thin_out(self) -> None:
        notes = _parse(_read(self._path))[::-2][::-1]
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.write_text("".join(f"{seconds:.2f} {size}\n" for seconds, size in notes))
        temporary.replace(self._path)
        self._count = len(notes)
        self._interval_seconds = max(1.0, self._interval_seconds * 2)


class TimesReader:
    """Reads the notes in the file at `path`, also while more are made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id = 0
        self._read_bytes = 0
        self._seconds: list[float] = []
        self._sizes: list[int] = []

    def refresh(self) -> None:
        """Take note of what is new."""
        # Without notes the lines have no times of their own; nothing else is lost.
        with suppress(OSError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file_id or found.st_size < self._read_bytes:
                # Thinned out meanwhile.
                self._file_id, self._read_bytes = found.st_ino, 0
                self._seconds, self._sizes = [], []
            if found.st_size > self._read_bytes:
                file.seek(self._read_bytes)
                self._take(file.read())

    def _take(self, text: bytes) -> None:
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        last = self._sizes[-1] if self._sizes else 0
        for seconds, size in _parse(whole):
            if size > last:
                self._seconds.append(seconds)
                self._sizes.append(size)

    def cut(self, start: int, end: int, *, beyond_seconds: float) -> Iterator[tuple[int, float]]:
        """Yield `(to, seconds)` for the pieces of `start` to `end` that were noted together, in order.

        `seconds` is the time of the first note that covers the piece, `beyond_seconds` beyond the last.
        """
        index = bisect_left(self._sizes, start + 1)
        while start < end:
            if index == len(self._sizes):
                yield end, beyond_seconds
                return
            start = min(end, self._sizes[index])
            yield start, self._seconds[index]
            index += 1

    def first_after(self, seconds: float) -> int:
        """Return a byte before which there is nothing that was noted at `seconds` or later."""
        before = 0
        for noted, size in zip(self._seconds, self._sizes, strict=True):
            if noted >= seconds:
                return before
            before = size
        return before


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # Without notes the lines have no times of their own; nothing else is lost.
        return b""


def _parse(text: bytes) -> list[tuple[float, int]]:
    notes: list[tuple[float, int]] = []
    # What is behind the last line's end is a note that a dying writer or a full disk tore.
    for line in text.split(b"\n")[:-1]:
        seconds, _, size = line.partition(b" ")
        with suppress(ValueError):
            note = (float(seconds), int(size))
            if not notes or note[1] > notes[-1][1]:
                notes.append(note)
    return notes
