"""How checkpoints of runs are shown: for `unbroken inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from unbroken.cli import output
from unbroken.cli.values import Section, flat, joined, printable, shortened, value_in_words

_FIRST = ("lr", "learning_rate", "weight_decay", "last_epoch")


def sections(found: dict[str, Any]) -> list[Section]:
    """Return the tables of a checkpoint of a run, each with a title for those that show it."""
    part = ("PART", "HANDLER", "TYPE", "TENSORS", "SIZE", "DTYPES")
    files = [(name, output.size(size)) for name, size in found["files"].items()]
    return [
        ("Handlers", part, [*map(_part, found["parts"].items())]),
        ("Details", ("OF", "DETAIL", "VALUE"), [*_details(found)]),
        ("Config", ("CONFIG", "VALUE"), [*flat(found["config"])]),
        ("Environment", ("ENVIRONMENT", "VALUE"), [*flat(found["environment"])]),
        ("Files", ("FILE", "SIZE"), files),
    ]


def lines(found: dict[str, Any]) -> list[str]:
    """Return what it is and where training stood."""
    where = "inside" if found["inside_epoch"] else "before"
    samples = [f"{count:,} samples consumed" for count in found["samples"] if count and found["inside_epoch"]]
    parent = f", after {found['parent']}" if found["parent"] else ""
    words = [
        found["path"],
        f"step {found['step']}, " + ", ".join([f"{where} epoch {found['epoch']}", *samples]),
        f"run {found['run_id']}, attempt {found['attempt']}, {found['created']}{parent}",
        f"{len(found['tensors'])} tensors, {output.size(found['size_bytes'])} in {len(found['files'])} files",
    ]
    if found["ranks"]:
        own = sorted({part for rank in found["ranks"] for part in rank["parts"]})
        each = f"; each has its own {', '.join(own)}" if own else ""
        words.append(f"saved by {1 + len(found['ranks'])} ranks{each}")
    if found["learning_rates"]:
        words.append("learning rate " + ", ".join(map(value_in_words, found["learning_rates"])))
    if found["metrics"]:
        words.append(output.metrics(found["metrics"]))
    if found["validation"] is not None and found["validation"]["passed"]:
        words.append("validation passed")
    if found["against"] is not None:
        words.append(f"{found['against']}: no run goes on from it by itself")
    return [*map(printable, words)]


def _part(item: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    name, part = item
    return (
        name,
        part["handler"],
        part["type"],
        str(part["tensors"]),
        output.size(part["size_bytes"]),
        ", ".join(part["dtypes"]),
    )


def _details(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what there is to say of each part, of tied weights, generators, loaders and choices."""
    for name, part in found["parts"].items():
        yield from ((name, detail, value) for detail, value in _of_part(part))
    for group in found["tied"]:
        yield group[0].partition("/")[0], "tied", shortened(" = ".join(group))
    for where in dict.fromkeys(generator["where"] for generator in found["generators"]):
        kinds = [generator["kind"] for generator in found["generators"] if generator["where"] == where]
        yield where, "generators", ", ".join(kinds)
    for index, loader in enumerate(found["position"]["loaders"]):
        yield f"loader {index}", "position", _loader(loader)
    for choice, value in found["choices"].items():
        if value:
            yield "choices", choice, value_in_words(value)


def _of_part(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for detail in ("frozen", "evaluating"):
        if part.get(detail):
            yield detail, _names([inner or "(itself)" for inner in part[detail]])
    for detail in ("attributes", "values"):
        if part.get(detail):
            yield detail, _values(part[detail])
    if part.get("gradients"):
        yield "gradients", f"of {part['gradients']} parameters, inside a step"
    for index, group in enumerate(part.get("groups", [])):
        count = len(group["parameters"])
        yield f"group {index}", f"{count} parameter{'s' * (count != 1)}, {_values(group['options'])}"


def _loader(loader: Mapping[str, Any]) -> str:
    words = [f"{loader[unit]:,} {unit}" for unit in ("samples", "batches", "workers") if loader[unit]]
    words = words or ["at the beginning of a pass"]
    return ", ".join([loader["name"], *words] if loader["name"] else words)


def _values(value: Any) -> str:
    if not isinstance(value, dict):
        return value_in_words(value)
    # What is switched off or private says little, and there is much of it in optimizers and schedulers.
    telling = {
        key: item
        for key, item in value.items()
        if item is not None and item is not False and not key.startswith("_")
    }
    order = chain((key for key in telling if key in _FIRST), (key for key in telling if key not in _FIRST))
    return joined(f"{key} {value_in_words(telling[key])}" for key in order)


def _names(names: Sequence[str]) -> str:
    return shortened(f"{len(names)}: {joined(names)}")
