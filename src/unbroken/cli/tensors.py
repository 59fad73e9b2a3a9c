"""The tensors of a checkpoint, for people: those that are asked for, as a table or as a tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unbroken.cli import output
from unbroken.cli.values import printable
from unbroken.errors import UsageError

if TYPE_CHECKING:
    from unbroken.dashboard.branches import Branch

# Rows as `unbroken inspect --json` has them.
Rows = Sequence[Mapping[str, Any]]
_TREE = ("BRANCH", "TENSORS", "SIZE", "DTYPES", "SHAPE")
_INDENT = "  "
# Comparing names is slow: no more of them, and no more of each, are looked at.
_MOST_COMPARED, _LONGEST_COMPARED = 5_000, 120
_MOST_NAMED = 3


def matching(rows: list[dict[str, Any]], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows whose path, or one of whose aliases, fits a pattern of the shell: all without one.

    Raises UsageError, with the nearest names, if none does.
    """
    if not patterns:
        return rows
    # Loaded here: most calls show all tensors.
    from fnmatch import translate

    fits = re.compile("|".join(map(translate, patterns))).match
    found = [row for row in rows if fits(row["path"]) or any(map(fits, row["aliases"]))]
    if found:
        return found
    near = ", ".join(map(printable, _nearest(rows, patterns[0]))) or "none, it has no tensors"
    raise UsageError(
        printable(f"--match {' '.join(patterns)}: expected tensors that fit, found none of {len(rows)}"),
        hint=f"* stands for any letters, / and . too; the nearest names are {near}",
    )


def show(rows: Rows, place: str) -> None:
    """Print a table of them, with where each lies, which is kept under `place`."""
    sizes = {size: output.size(size) for size in {row["size_bytes"] for row in rows}}
    lines = [
        (
            printable(row["path"]),
            row["dtype"],
            _shape(row),
            sizes[row["size_bytes"]],
            printable(row[place]),
            printable(", ".join(row["aliases"])),
        )
        for row in rows
    ]
    header: tuple[str, ...] = ("TENSOR", "DTYPE", "SHAPE", "SIZE", place.upper(), "ALIASES")
    # What the library calls a tensor, where that is not its path.
    names = [printable(row.get("name") or "") for row in rows]
    output.data("")
    if any(names):
        output.table((*header, "NAME"), [(*line, name) for line, name in zip(lines, names, strict=True)])
    else:
        output.table(header, lines)


def show_tree(rows: Rows, depth: int | None) -> None:
    """Print them as a tree, with the number, the size and the dtypes of each branch, `depth` levels of it."""
    # Loaded here: only this needs it.
    from unbroken.dashboard.branches import branches

    output.data("")
    output.table(_TREE, [*_inside(branches(rows), depth, "")])


def _inside(branch: Branch, depth: int | None, indent: str) -> Iterator[tuple[str, ...]]:
    from unbroken.dashboard.branches import Branch, merged

    for name, item in branch.items:
        full_name, below = merged(name, item)
        if not isinstance(below, Branch):
            size = output.size(below["size_bytes"])
            yield f"{indent}{printable(full_name)}", "", size, below["dtype"], _shape(below)
            continue
        size, dtypes = output.size(below.size_bytes), ", ".join(below.dtypes)
        yield f"{indent}{printable(full_name)}", f"{below.tensors:,}", size, dtypes, ""
        if depth is None or depth > 1:
            yield from _inside(below, depth and depth - 1, indent + _INDENT)


def _shape(row: Mapping[str, Any]) -> str:
    return "x".join(map(str, row["shape"])) or "scalar"


def _nearest(rows: Rows, pattern: str) -> list[str]:
    """Return the paths that are most like a pattern."""
    from difflib import get_close_matches

    paths = {row["path"][:_LONGEST_COMPARED]: row["path"] for row in rows[:_MOST_COMPARED]}
    near = get_close_matches(pattern[:_LONGEST_COMPARED], paths, _MOST_NAMED, cutoff=0.0)
    return [paths[path] for path in near]
