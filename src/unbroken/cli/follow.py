"""Reading the output of a run while it is written, over all its attempts."""

from __future__ import annotations

import errno
import heapq
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from unbroken.rundir import layout
from unbroken.supervisor.side.output_times import TimesReader

_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some output of an attempt, written to the file `log` by the time `seconds`.

    `freed_bytes` of older output are missing before it.
    """

    attempt: int
    log: Path
    data: bytes
    seconds: float
    freed_bytes: int = 0


class OutputReader:
    """Hands out what was added to the output `log` since the last look, plain or compressed.

    It begins with the first byte that is still there, or with the byte `start` if that is later.
    """

    def __init__(self, attempt: int, log: Path, *, start: int = 0) -> None:
        self.log = log
        self._attempt = attempt
        self._times = TimesReader(layout.output_times(log))
        self._start = start
        self._position = 0
        self._freed_bytes = 0
        self._file: BinaryIO | None = None
        self._is_plain = True

    def new(self) -> Iterator[Piece]:
        """Yield all that is new, in order, cut where the time changes."""
        if self._file is None and not self._open():
            return
        while data := self._read():
            self._times.refresh()
            end, at = self._position, self._position - len(data)
            beyond = os.fstat(cast(BinaryIO, self._file).fileno()).st_mtime
            for to, seconds in self._times.cut(at, end, beyond_seconds=beyond):
                piece, data = data[: to - at], data[to - at :]
                freed, self._freed_bytes = self._freed_bytes, 0
                yield Piece(
                    attempt=self._attempt, log=self.log, data=piece, seconds=seconds, freed_bytes=freed
                )
                at = to

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        # The archive second: it is whole before the plain file goes away.
        with suppress(FileNotFoundError, NotADirectoryError):
            self._file = self.log.open("rb", buffering=0)
            self._position = self._start
            return True
        with suppress(FileNotFoundError, NotADirectoryError):
            self._file = _open_archive(layout.output_archive(self.log))
            self._is_plain = False
            self._position = self._freed_bytes = _archive_start(self.log)
            while self._position < self._start and self._read(self._start - self._position):
                self._freed_bytes = 0
            return True
        return False

    def _read(self, most: int = _PIECE_BYTES) -> bytes:
        file = cast(BinaryIO, self._file)
        if not self._is_plain:
            data = file.read(min(most, _PIECE_BYTES))
            self._position += len(data)
            return data
        while data := os.pread(file.fileno(), _PIECE_BYTES, self._position):
            # Some file systems write all to the disk before they answer this, so it is asked seldom.
            is_freed = data.startswith(b"\0")
            behind_hole = first_data(file.fileno(), self._position) if is_freed else self._position
            if behind_hole == self._position:
                self._position += len(data)
                return data
            # Those zeros are no output: it was freed meanwhile, or long ago.
            self._freed_bytes += behind_hole - self._position
            self._position = behind_hole
        return b""


class OutputFollower:
    """Hands out what attempts of the run in `directory` have written since the last look.

    It begins with attempt `first`, at the byte `start` of its output, and goes on into later ones unless
    `only_one` is wanted. With `rank` it is the output of that local rank alone, which torchrun separated.
    """

    def __init__(
        self,
        directory: Path,
        first: int,
        *,
        only_one: bool = False,
        rank: int | None = None,
        start: int = 0,
    ) -> None:
        self._directory = directory
        self._attempt = first
        self._only_one = only_one
        self._rank = rank
        self._start = start
        self._readers: dict[Path, OutputReader] = {}

    def new(self) -> Iterator[Piece]:
        """Yield all that is new, in order."""
        while True:
            # Looked up before reading: once a later attempt exists, this one's output is complete.
            later = None if self._only_one else self._later()
            self._look_for_logs()
            yield from heapq.merge(
                *(reader.new() for reader in self._readers.values()), key=lambda piece: piece.seconds
            )
            if later is None:
                return
            self.close()
            self._attempt = later

    @property
    def is_complete(self) -> bool:
        """True when nothing can follow what was read: only one attempt is wanted, and it is not the last."""
        return self._only_one and self._later() is not None

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._start = 0

    def _look_for_logs(self) -> None:
        for log in output_logs(layout.attempt_directory(self._directory, self._attempt), self._rank):
            if log not in self._readers:
                self._readers[log] = OutputReader(self._attempt, log, start=self._start)

    def _later(self) -> int | None:
        return min((n for n in layout.attempts(self._directory) if n > self._attempt), default=None)


def output_logs(attempt_directory: Path, rank: int | None = None) -> list[Path]:
    """Return the files with the output of an attempt, or of one of its ranks, as they were when written."""
    if rank is None:
        return [attempt_directory / layout.OUTPUT_LOG]
    place = attempt_directory / layout.RANKS
    found = [path for end in ("", ".gz") for path in place.glob(f"*/attempt_*/{rank}/std*.log{end}")]
    return sorted({path.with_name(path.name.removesuffix(".gz")) for path in found})


def first_data(descriptor: int, position: int) -> int:
    """Return where the output in a plain file goes on, from `position`: behind what was freed."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: the file ends here. Else the file system cannot tell, and then it frees nothing either.
        if error.errno not in (errno.ENXIO, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return position


def start_of_lines(log: Path, count: int, *, end: int | None = None) -> int:
    """Return where the last `count` whole lines before the byte `end` of the plain output `log` begin.

    The end of a line just before `end` does not count as one; 0 is returned where there are fewer lines.
    """
    try:
        file = log.open("rb", buffering=0)
    except OSError:
        return 0
    with file:
        position = os.fstat(file.fileno()).st_size if end is None else end
        # What was freed reads as zeros, for as long as it was.
        is_freed = os.pread(file.fileno(), 1, 0) == b"\0"
        first = first_data(file.fileno(), 0) if is_freed else 0
        while position > first:
            step = min(_PIECE_BYTES, position - first)
            position -= step
            piece = os.pread(file.fileno(), step, position)
            ends = piece.count(b"\n")
            if ends > count:
                for _ in range(count + 1):
                    piece = piece[: piece.rindex(b"\n")]
                return position + len(piece) + 1
            count -= ends
    return 0


def _open_archive(path: Path) -> BinaryIO:
    # Loaded here: most outputs are not compressed.
    import gzip

    return cast(BinaryIO, gzip.open(path))


def _archive_start(log: Path) -> int:
    try:
        return int(layout.output_start(log).read_text())
    except (OSError, ValueError):
        return 0
