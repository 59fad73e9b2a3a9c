"""`unbroken diff`: what is different between two checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from operator import not_
from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.target import open_target
from unbroken.cli.values import printable, section, shortened, value_in_words
from unbroken.errors import EXIT_DAMAGED, EXIT_ERROR
from unbroken.inspection.detect import CheckpointReader, StoredTensor
from unbroken.inspection.diff import ChangedTensor, ChangedValue, Difference, compare
from unbroken.inspection.lost_parts import LostPart

# Where training stood comes before what the parts say, and the environment after it.
_OF_TRAINING = ("step", "position", "metrics")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def diff(a: str, b: str, as_json: bool) -> None:
    """Show what is different between the checkpoints A and B, what matters most first.

    A and B are paths of checkpoints, of any format that `unbroken inspect` shows; a run (its newest
    checkpoint), or RUN:NAME. Every tensor whose digests do not prove it equal is read.
    Exits with 0 if nothing differs, with 1 if something does, with 3 if one is damaged or incomplete.

    \b
    Fields of --json:
      a, b (path, format), equal, equal_tensors,
      lost [part, where, present ("A" or "B"), is_whole, moments, text],
      only_in_a, only_in_b {path: dtype, shape, size_bytes, where, aliases, digest},
      renamed [before, after, pairs {a: b}],
      changed [path, path_in_b, dtypes, shapes, closeness (elements, equal, equal_fraction, largest,
        nans), null if the shapes differ], ties, values, facts [path, a, b], notes,
      problems [side ("A" or "B"), file, problem]
    """
    first, second = open_target(a), open_target(b)
    found = compare(first, second)
    if as_json:
        output.data_json({"a": _named(first), "b": _named(second), **found.as_json()})
    else:
        _show(first, second, found)
    if found.problems:
        click.get_current_context().exit(EXIT_DAMAGED)
    if not found.is_empty:
        click.get_current_context().exit(EXIT_ERROR)


def _named(reader: CheckpointReader) -> dict[str, str]:
    return {"path": str(reader.path), "format": reader.format}


def _show(first: CheckpointReader, second: CheckpointReader, found: Difference) -> None:
    for side, reader in (("A", first), ("B", second)):
        output.data(printable(f"{side}  {reader.path}  {reader.format}"))
    for problem in found.problems:
        text = f"{problem.side} is damaged: {problem.file}: {problem.problem}"
        output.data(output.painted(printable(text), "red", sys.stdout))
    for lost in found.lost:
        output.data(output.painted(printable(lost.text), "red", sys.stdout))
    told = {side: [lost for lost in found.lost if lost.present == side] for side in "AB"}
    rows = [
        *_alone("A", found.only_in_a, told["A"]),
        *_alone("B", found.only_in_b, told["B"]),
    ]
    section(("TENSOR", "ONLY IN", "DTYPE", "SHAPE"), rows)
    section(
        ("RENAMED", "TO", "TENSORS"),
        [
            (item.before or "(nothing)", item.after or "(nothing)", str(len(item.pairs)))
            for item in found.renamed
        ],
    )
    section(
        ("TENSOR", "DTYPE", "SHAPE", "LARGEST DIFFERENCE", "EQUAL", "NAN"), [*map(_changed, found.changed)]
    )
    section(("TIED", "IN A", "IN B"), [_tie(item) for item in found.ties])
    section(("VALUE", "A", "B"), [*map(_value, _in_order(found))])
    _show_end(found)


def _in_order(found: Difference) -> list[ChangedValue]:
    is_of_training = [item.path.partition("/")[0] in _OF_TRAINING for item in found.facts]
    return [
        *compress(found.facts, is_of_training),
        *found.values,
        *compress(found.facts, map(not_, is_of_training)),
    ]


def _show_end(found: Difference) -> None:
    if found.notes:
        output.data("")
    for note in found.notes:
        output.data(note)
    output.data("")
    tensors = f"{found.equal_tensors} tensors are equal to the last bit"
    if found.problems:
        tensors += ", of what is damaged nobody can tell"
    output.data(f"nothing differs, {tensors}" if found.is_empty and not found.problems else tensors)


def _alone(side: str, tensors: dict[str, StoredTensor], told: list[LostPart]) -> list[tuple[str, ...]]:
    return [
        (path, side, entry.dtype, _shape(entry.shape))
        for path, entry in tensors.items()
        if not any(lost.covers(path) for lost in told)
    ]


def _changed(item: ChangedTensor) -> tuple[str, ...]:
    name = item.path if item.path == item.path_in_b else f"{item.path} -> {item.path_in_b}"
    cells = [_both(*item.dtypes), _both(*map(_shape, item.shapes))]
    if item.closeness is None:
        return (name, *cells, "", "", "")
    found = item.closeness
    largest = "" if found.largest is None else value_in_words(found.largest)
    nans = "" if found.nans == (0, 0) else _both(*map(str, found.nans))
    return (name, *cells, largest, _percent(found.equal, found.elements), nans)


def _percent(equal: int, elements: int) -> str:
    """Return a share, never rounded to all of it: one element in a million is what is looked for."""
    if equal == elements:
        return "all"
    share = f"{100 * equal / elements:.2f}%"
    return f"all but {elements - equal}" if share == "100.00%" else share


def _tie(item: ChangedValue) -> tuple[str, ...]:
    words = shortened(" = ".join(item.a or item.b))
    return (words, "tied" if item.a else "apart", "tied" if item.b else "apart")


def _value(item: ChangedValue) -> tuple[str, ...]:
    return (item.path, value_in_words(item.a), value_in_words(item.b))


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} -> {other}"


def _shape(shape: Sequence[Any]) -> str:
    return "x".join(str(length) for length in shape) or "scalar"
