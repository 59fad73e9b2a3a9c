"""Values and tables of checkpoints, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unbroken.cli import output

# Longer is for programs: --json shortens nothing.
_LONGEST_VALUE = 100
_MOST_ROWS = 60
_DEEPEST = 4
# A title, the header and the rows of a table.
Section = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def section(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table after a blank line, the first of its rows if there are too many; nothing without rows."""
    if not rows:
        return
    output.data("")
    output.table(header, [[printable(cell) for cell in row] for row in rows[:_MOST_ROWS]])
    if len(rows) > _MOST_ROWS:
        output.data(f"... and {len(rows) - _MOST_ROWS} more, which --json shows")


def flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield dotted names and values: dictionaries are opened, the deepest are shown as they are."""
    if not isinstance(value, dict) or not value or depth == _DEEPEST:
        if value is not None or name:
            yield name, shortened(value if isinstance(value, str) else repr(value))
        return
    for key, item in value.items():
        yield from flat(item, f"{name}.{key}" if name else key, depth + 1)


def value_in_words(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, dict) and "$tensor" in value:
        return "(tensor)"
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(value if isinstance(value, str) else repr(value))


def shortened(text: str) -> str:
    """Return `text`, cut if it is long."""
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def joined(words: Iterable[str]) -> str:
    """Return `words` with commas between, cut if that is long: no more are asked for than are shown."""
    text = ""
    for word in words:
        text += f", {word}" if text else word
        if len(text) > _LONGEST_VALUE:
            break
    return shortened(text)


def printable(text: str) -> str:
    """Return `text` without what a terminal would not print but obey."""
    # A name or value from a file must not move the cursor of a terminal.
    return text if text.isprintable() else repr(text)[1:-1]
