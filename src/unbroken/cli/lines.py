"""Lines of output, from pieces of it: of each file on its own, so that no two are mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from unbroken.cli.collapse import Collapser, Line
from unbroken.cli.follow import Piece


class OutputLine(NamedTuple):
    """A line of an attempt's output, without its end, and when it was written."""

    attempt: int
    seconds: float
    text: str


class OutputLines:
    """Turns pieces into lines: progress bars in their last state, or all as it was written if `raw`."""

    def __init__(self, *, raw: bool = False, with_colours: bool = False) -> None:
        self._raw = raw
        self._with_colours = with_colours
        self._attempt = 0
        self._splitters: dict[Path, _Splitter] = {}

    def add(self, piece: Piece) -> list[OutputLine]:
        """Return the lines that `piece` completes."""
        before = self.finish() if piece.attempt != self._attempt else []
        self._attempt = piece.attempt
        splitter = self._splitters.get(piece.log)
        if splitter is None:
            splitter = _RawSplitter() if self._raw else Collapser(with_colours=self._with_colours)
            self._splitters[piece.log] = splitter
        return before + self._lines(splitter.add(piece.data, piece.seconds))

    def finish(self) -> list[OutputLine]:
        """Return what is left: bars, and last lines without an end."""
        left = [line for splitter in self._splitters.values() for line in splitter.finish()]
        self._splitters.clear()
        return self._lines(left)

    @property
    def pending(self) -> str:
        """A line that may still change, as it is now; empty if there is none."""
        return next((text for splitter in self._splitters.values() if (text := splitter.pending)), "")

    def _lines(self, lines: list[Line]) -> list[OutputLine]:
        return [OutputLine(self._attempt, line.seconds, line.text) for line in lines]


class _Splitter(Protocol):
    def add(self, piece: bytes, seconds: float) -> list[Line]: ...

    def finish(self) -> list[Line]: ...

    @property
    def pending(self) -> str: ...


class _RawSplitter:
    """Splits at line feeds and changes nothing else."""

    def __init__(self) -> None:
        self._torn: list[bytes] = []
        self._seconds = 0.0

    def add(self, piece: bytes, seconds: float) -> list[Line]:
        self._seconds = seconds
        first, *others = piece.split(b"\n")
        self._torn.append(first)
        if not others:
            return []
        *whole, torn = b"".join(self._torn), *others
        self._torn = [torn]
        return [Line(line.decode(errors="replace"), seconds) for line in whole]

    def finish(self) -> list[Line]:
        rest, self._torn = b"".join(self._torn), []
        return [Line(rest.decode(errors="replace"), self._seconds)] if rest else []

    @property
    def pending(self) -> str:
        return ""
