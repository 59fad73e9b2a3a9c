"""What a terminal would show in the end: progress bars in their last state, without what moved the cursor.

Text is kept in rows that may still change: a bar is drawn over itself (carriage return), nested bars go up to
the rows above (cursor up). Only what was drawn over or erased is dropped.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import NamedTuple

# Rows of bars wait, so that nested bars find them again; those further up than this do not.
MOST_ROWS = 16
# Longer lines are cut, and the cursor is not sent further right than this by a number alone.
LONGEST_LINE = 1_000_000
_FURTHEST_COLUMN = 500
# Programs that never reset their colours must not make a style longer and longer.
_MOST_STYLES = 6
_RESET = "\x1b[0m"
_LONGEST_ESCAPE = 2100
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0a-\x1f\x7f\x80-\x9f]+)"
    r"|\x1b\[(?P<parameters>[0-9:;<=>?]{0,40})[ -/]{0,3}(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)"
    r"|\x1b[ -/]{0,3}[0-9A-Z^-~\\]"
    r"|(?P<control>.)",
    re.DOTALL,
)
# The beginning of an escape sequence that the next piece may complete.
_TORN = re.compile(
    r"\x1b(?:\[[0-9:;<=>?]{0,40}[ -/]{0,3}|\][^\x07\x1b\n]{0,2000}\x1b?|[ -/]{0,3})?\Z", re.DOTALL
)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_COLOUR = re.compile(r"\x1b\[([0-9:;]{0,40})m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


class Line(NamedTuple):
    """A line that changes no more; `seconds` is the time of the last piece that changed it."""

    text: str
    seconds: float


@dataclass(slots=True)
class _Row:
    """`is_made_up` tells that the cursor went there, above or below all rows, and no line feed."""

    cells: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_bar: bool = False
    is_made_up: bool = False

    def put(self, column: int, text: str, style: str) -> None:
        missing = column - len(self.cells)
        if missing > 0:
            self.cells += " " * missing
            self.styles += [""] * missing
        self.cells[column : column + len(text)] = text
        self.styles[column : column + len(text)] = [style] * len(text)

    def erase(self, first: int, last: int) -> None:
        if last >= len(self.cells):
            del self.cells[first:], self.styles[first:]
        elif first < last:
            self.put(first, " " * (last - first), "")

    def render(self) -> str:
        pieces, style = [], ""
        for cell, wanted in zip(self.cells, self.styles, strict=True) if any(self.styles) else ():
            if wanted != style:
                pieces.append((_RESET if style else "") + wanted)
                style = wanted
            pieces.append(cell)
        text = "".join(pieces or self.cells) + (_RESET if style else "")
        # A bar is padded to cover what it was before.
        return text.rstrip(" ") if self.is_bar else text


class Collapser:
    """Turns pieces of output into lines; how it is cut into pieces makes no difference to their text."""

    def __init__(self, *, with_colours: bool = False) -> None:
        self._with_colours = with_colours
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._torn = ""
        self._rows = [_Row()]
        self._row = 0
        self._column = 0
        self._style: tuple[str, ...] = ()
        self._is_after_return = False
        self._done: list[Line] = []
        self._seconds = 0.0

    def add(self, piece: bytes, seconds: float) -> list[Line]:
        """Take in the next piece, written at `seconds`, and return the lines that it completed."""
        self._seconds = seconds
        text = self._torn + self._decode(piece)
        torn = _TORN.search(text, max(0, len(text) - _LONGEST_ESCAPE))
        end = torn.start() if torn is not None else len(text)
        self._torn = text[end:]
        self._take(text[:end])
        return self._taken()

    def finish(self) -> list[Line]:
        """Return all that is left, at the end of the output."""
        self._take(self._torn + self._decode(b"", True))
        while self._rows and not self._rows[-1].cells:
            self._rows.pop()
        self._release(len(self._rows))
        return self._taken()

    @property
    def pending(self) -> str:
        """The last line as it is now: a bar, or text without an end."""
        return next(("".join(row.cells) for row in reversed(self._rows) if row.cells), "")

    def _taken(self) -> list[Line]:
        done, self._done = self._done, []
        return done

    def _take(self, text: str) -> None:
        if self._is_plain and len(text) <= LONGEST_LINE and not _CONTROL.search(text):
            # Most output is this, and all the rest is ten times slower.
            *lines, text = text.split("\n")
            self._done += [Line(line, self._seconds) for line in lines]
        for line in _LINE.findall(text):
            is_whole = line.endswith("\n") and len(line) <= LONGEST_LINE
            shown = self._coloured(line[:-1]) if is_whole and self._is_at_start else None
            if shown is not None:
                self._done.append(Line(shown, self._seconds))
            else:
                self._draw(line)

    @property
    def _is_plain(self) -> bool:
        return self._is_at_start and not self._style

    @property
    def _is_at_start(self) -> bool:
        """True at the start of a line with nothing above it that waits."""
        is_elsewhere = self._column or self._is_after_return
        return len(self._rows) == 1 and not self._rows[0].cells and not is_elsewhere

    def _coloured(self, line: str) -> str | None:
        """Return how a line is shown that has nothing but colours in it, or None if it has more."""
        shown = _COLOUR.sub("", line)
        if _CONTROL.search(shown):
            return None
        if not self._with_colours or (shown == line and not self._style):
            return shown
        first, *others = _COLOUR.split(line)
        pieces, style = [], ""
        for parameters, text in zip((None, *others[::2]), (first, *others[1::2]), strict=True):
            if parameters is not None:
                self._colour(parameters)
            wanted = "".join(self._style)
            if text and wanted != style:
                pieces.append((_RESET if style else "") + wanted)
                style = wanted
            pieces.append(text)
        return "".join(pieces) + (_RESET if style else "")

    def _draw(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
            if token["text"] is not None:
                self._put(token["text"])
            elif token["control"] is not None:
                self._control(token["control"])
            elif token["final"] is not None:
                self._escape(token["final"], token["parameters"])

    def _put(self, text: str) -> None:
        while text:
            if self._column >= LONGEST_LINE:
                self._line_feed()
            row = self._rows[self._row]
            part = text[: LONGEST_LINE - self._column]
            row.is_bar |= self._is_after_return
            row.put(self._column, part, "".join(self._style))
            row.seconds = self._seconds
            self._column += len(part)
            text = text[len(part) :]

    def _control(self, control: str) -> None:
        if control == "\n":
            self._line_feed()
        elif control == "\r":
            self._column = 0
            self._is_after_return = True
        elif control == "\b":
            self._column = max(0, self._column - 1)

    def _line_feed(self) -> None:
        row = self._rows[self._row]
        row.seconds = self._seconds
        row.is_made_up = False
        # With nothing above it an empty line is on the way to nowhere.
        is_text = not row.is_bar and (bool(row.cells) or len(self._rows) == 1)
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(_Row())
        self._column = 0
        self._is_after_return = False
        # Text ends what is above it. A bar, or an empty line, may be on the way between nested bars.
        self._release(self._row if is_text else min(self._row, len(self._rows) - MOST_ROWS))

    def _release(self, count: int) -> None:
        """Let go of the first `count` rows: they change no more."""
        if count <= 0:
            return
        for row in self._rows[:count]:
            if row.cells or not row.is_made_up:
                self._done.append(Line(row.render(), row.seconds))
        del self._rows[:count]
        self._row -= count

    def _escape(self, final: str, parameters: str) -> None:
        if final == "m":
            self._colour(parameters)
            return
        first = parameters.partition(";")[0]
        number = int(first) if first.isdecimal() else 0
        if final in "AF":
            self._up(min(max(1, number), MOST_ROWS))
        elif final in "BE":
            self._down(min(max(1, number), MOST_ROWS))
        elif final == "C":
            self._column = max(self._column, min(self._column + max(1, number), _FURTHEST_COLUMN))
        elif final == "D":
            self._column = max(0, self._column - max(1, number))
        elif final == "G":
            self._column = min(max(1, number) - 1, _FURTHEST_COLUMN)
        elif final in "JK":
            self._erase(final, number)
        if final in "EF":
            self._column = 0

    def _up(self, count: int) -> None:
        missing = count - self._row
        if missing > 0:
            # The rows up there are shown already and change no more; new ones take what is drawn there.
            self._rows[:0] = [_Row(is_made_up=True) for _ in range(missing)]
            self._row += missing
        self._row -= count
        self._is_after_return = False

    def _down(self, count: int) -> None:
        self._row += count
        missing = self._row - len(self._rows) + 1
        self._rows += [_Row(is_made_up=True) for _ in range(missing)]
        self._is_after_return = False
        self._release(min(self._row, len(self._rows) - MOST_ROWS))

    def _erase(self, final: str, number: int) -> None:
        row = self._rows[self._row]
        if number == 0:
            row.erase(self._column, len(row.cells))
            if final == "J":
                for below in self._rows[self._row + 1 :]:
                    below.erase(0, len(below.cells))
        elif final == "K":
            row.erase(0, self._column + 1 if number == 1 else len(row.cells))

    def _colour(self, parameters: str) -> None:
        if not self._with_colours:
            return
        if parameters in ("", "0"):
            self._style = ()
        else:
            self._style = (*self._style, f"\x1b[{parameters}m")[-_MOST_STYLES:]
