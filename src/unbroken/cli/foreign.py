"""How checkpoints of other libraries are shown: for `unbroken inspect`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from unbroken.cli import output
from unbroken.cli.values import Section, flat, printable, shortened, value_in_words


def sections(found: dict[str, Any]) -> list[Section]:
    """Return the tables, each with a title for those that show it."""
    parts = [
        (name, str(part["tensors"]), output.size(part["size_bytes"]), ", ".join(part["dtypes"]))
        for name, part in found["parts"].items()
    ]
    values, metadata = _without_tensors(found["values"]), found["metadata"]
    return [
        ("Names", ("PART", "TENSORS", "SIZE", "DTYPES"), parts),
        ("Details", ("OF", "DETAIL", "VALUE"), [*_details(found)]),
        ("Values", ("KEY", "VALUE"), [*flat(values)] if values else []),
        ("Metadata", ("METADATA", "VALUE"), [*flat(metadata)] if metadata else []),
    ]


def lines(found: dict[str, Any]) -> list[str]:
    """Return what it is, with colour on a terminal."""
    return [*_lines(found)]


def _lines(found: dict[str, Any]) -> Iterator[str]:
    # Colour comes last: what makes text printable would show its codes.
    yield printable(found["path"])
    state = "complete" if found["complete"] else output.painted("INCOMPLETE", "red", sys.stdout)
    yield f"{printable(found['format'])}, {state}, {printable(found['checksums'] or 'no checksums')}"
    size = output.size(sum(row["size_bytes"] for row in found["tensors"]))
    files = f"{len(found['files'])} file{'s' * (len(found['files']) != 1)}"
    yield f"{len(found['tensors'])} tensors, {size}, in {files}"
    if found["counters"]:
        words = [f"{where} {value_in_words(value)}" for where, value in found["counters"].items()]
        yield printable(", ".join(words))
    rates = [rate for optimizer in found["optimizers"] for rate in optimizer["learning_rates"]]
    if rates:
        yield "learning rate " + ", ".join(map(value_in_words, rates))


def _details(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for optimizer in found["optimizers"]:
        kept = f", each with {', '.join(optimizer['moments'])}" if optimizer["moments"] else ""
        groups = f"{optimizer['groups']} group{'s' * (optimizer['groups'] != 1)}"
        words = f"{optimizer['parameters']} parameters, {groups}"
        yield optimizer["where"] or "(top)", "optimizer", f"{words}, {optimizer['states']} states{kept}"
    for scheduler in found["schedulers"]:
        words = ", ".join(
            f"{key} {value_in_words(value)}" for key, value in scheduler.items() if key != "where"
        )
        yield scheduler["where"] or "(top)", "scheduler", shortened(words)
    for wrapper, count in found["wrappers"].items():
        yield "names", "wrapper", f"{wrapper} in {count} of {len(found['tensors'])}"
    for group in found["tied"]:
        yield group[0].partition("/")[0], "tied", shortened(" = ".join(group))
    if found["objects"]:
        words = shortened(", ".join(found["objects"]))
        yield "pickle", "names", f"{words} (listed, never imported or called)"
    for note in found["notes"]:
        yield "content", "note", note


def _without_tensors(value: Any) -> Any:
    """Return values without references to tensors and what holds nothing else: tensors have a table."""
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if key == "$tensor":
            continue
        inner = _without_tensors(item)
        if inner != {} or item == {}:
            found[key] = inner
    return found
