"""`unbroken inspect`: what is in a checkpoint."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from unbroken.cli import checks, output, picture
from unbroken.cli.target import find_checkpoint, find_foreign
from unbroken.cli.values import Section, flat, printable, section, shortened, value_in_words
from unbroken.errors import EXIT_DAMAGED, UsageError

_FIRST = ("lr", "learning_rate", "weight_decay", "last_epoch")


@click.command()
@click.argument("target", required=False)
@click.argument("checkpoint", required=False)
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option("--values", "with_values", is_flag=True, help="Read every tensor: its range, mean, NaN, zeros.")
@click.option("--verify", "with_check", is_flag=True, help="Read every byte, as `unbroken verify` does.")
@click.option("--html", metavar="FILE", help="Write an HTML page to look at instead; - is stdout.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object, always with the tensors.")
def inspect(target: str | None, checkpoint: str | None, html: str | None, **asked: bool) -> None:
    """Show what is in a checkpoint: a path, or CHECKPOINT (default: the newest) of the run TARGET.

    The manifest is verified; tensors are not read but with --values. A path may be of
    another library: a file of torch.save (its pickle is read, never executed), safetensors, .npz.
    Exits with 3 if it is damaged or incomplete.

    The page of --html is one file without scripts, which needs no network: what it is, its parts by size,
    and all tensors as a tree that folds. An older page of that name is replaced.

    \b
    Fields of --json, for checkpoints of runs:
      path, run_id, step, epoch, inside_epoch, samples (consumed of each loader), created, attempt,
      parent, format_version, size_bytes, learning_rates, metrics, config, environment,
      non_finite, validation (as in `unbroken ls --json`),
      against (why no run goes on from it by itself, or null),
      choices (what the user chose where a restore was not exact),
      position (epoch, inside_epoch, passes, open,
        loaders [name, samples, batches, workers, generators]),
      parts {name: type, handler, tensors, size_bytes, dtypes {dtype: size_bytes}, and of
        modules frozen [name], evaluating [name], attributes {module: {name: value}}, gradients,
        optimizers groups [parameters, options], states, others values},
      ranks [epoch, inside_epoch, samples, parts (that it has otherwise)] (the further ones, in order),
      tied [[path]], generators [where, kind], files {name: size_bytes},
      tensors [path, dtype, shape, size_bytes, file, digest, aliases]
    for others:
      path, format, complete, problems [file, problem], size_bytes, files {name: size_bytes},
      checksums (what it carries, or null), counters {where: number}, optimizers [where, groups,
        parameters, learning_rates, states, moments], schedulers [where, last_epoch, ...],
      parts {name: tensors, size_bytes, dtypes}, wrappers {prefix: tensors}, tied [[path]],
      objects [name] (classes and functions that loading it would import), metadata,
      attributes {path: what hangs on a dictionary beside its items}, notes,
      values (all else, as plain data), tensors [path, dtype, shape, size_bytes, where, aliases]
    with --values, each of the tensors has numbers (null: of no kind that is read as numbers):
      elements, least, largest, mean (of what is finite), zeros, denormals, nans, infinities
    with --verify there is verification: intact (null: no checksum, nothing wrong), checksums,
      findings [file, problem]
    """
    if html is not None and asked["as_json"]:
        raise UsageError("expected --html or --json, found both", hint="ask for one after the other")
    if html is not None:
        picture.check_place(html)
    path = find_foreign(target) if checkpoint is None else None
    if path is not None:
        _show_foreign(path, html, **asked)
    else:
        _show_ours(target, checkpoint, html, **asked)


def _show_ours(
    target: str | None,
    checkpoint: str | None,
    html: str | None,
    *,
    with_tensors: bool,
    with_values: bool,
    with_check: bool,
    as_json: bool,
) -> None:
    # Loaded here: checkpoints of other libraries need none of it.
    from unbroken.inspection.summary import summarize

    located = find_checkpoint(target, checkpoint)
    with _without_collection():
        found = summarize(located)
    if with_check:
        found["verification"] = checks.of_ours(located)
    if with_values and _is_readable(found):
        from unbroken.cli import numbers
        from unbroken.inspection.detect import open_located

        numbers.add(open_located(located), found["tensors"])
    if as_json:
        output.data_json(found)
    elif html is not None:
        picture.write(html, found, lines=_lines(found), sections=_sections(found))
    else:
        for line in _lines(found):
            output.data(printable(line))
        _show_check(found)
        for _, header, rows in _sections(found):
            section(header, rows)
        if with_tensors:
            output.data("")
            output.table(
                ("TENSOR", "DTYPE", "SHAPE", "SIZE", "FILE", "ALIASES"),
                [_tensor(row) for row in found["tensors"]],
            )
        if with_values and _is_readable(found):
            numbers.show(found["tensors"])
    if not _is_readable(found):
        click.get_current_context().exit(EXIT_DAMAGED)


def _show_foreign(
    path: Path,
    html: str | None,
    *,
    with_tensors: bool,
    with_values: bool,
    with_check: bool,
    as_json: bool,
) -> None:
    # Loaded here: our own checkpoints need none of it.
    from unbroken.cli import foreign, numbers
    from unbroken.inspection.detect import open_checkpoint
    from unbroken.inspection.foreign import describe

    with _without_collection():
        reader = open_checkpoint(path)
        found = describe(reader)
    if with_check:
        found["verification"] = checks.of_others(reader)
    if with_values and _is_readable(found):
        numbers.add(reader, found["tensors"])
    if as_json:
        output.data_json(found)
    elif html is not None:
        lines, sections = foreign.lines(found), foreign.sections(found)
        picture.write(html, found, lines=lines, sections=sections)
    else:
        foreign.show(found, with_tensors=with_tensors)
        _show_check(found)
        if with_values and _is_readable(found):
            numbers.show(found["tensors"])
    if not found["complete"] or not _is_readable(found):
        click.get_current_context().exit(EXIT_DAMAGED)


def _is_readable(found: Mapping[str, Any]) -> bool:
    """Tell whether nothing is known to be damaged: of what is, numbers tell nothing."""
    check = found.get("verification")
    return check is None or check["intact"] is not False


def _show_check(found: Mapping[str, Any]) -> None:
    check = found.get("verification")
    if check is None:
        return
    words = checks.in_words(check)
    output.data(words if _is_readable(found) else output.painted(words, "red", sys.stdout))
    for one in check["findings"]:
        output.data(printable(f"  {one['file']}: {one['problem']}"))


def _sections(found: dict[str, Any]) -> list[Section]:
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


@contextmanager
def _without_collection() -> Iterator[None]:
    # Nothing of what is read is let go of, and looking through it for garbage takes a third of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _lines(found: dict[str, Any]) -> list[str]:
    where = "inside" if found["inside_epoch"] else "before"
    samples = [f"{count:,} samples consumed" for count in found["samples"] if count and found["inside_epoch"]]
    parent = f", after {found['parent']}" if found["parent"] else ""
    lines = [
        found["path"],
        f"step {found['step']}, " + ", ".join([f"{where} epoch {found['epoch']}", *samples]),
        f"run {found['run_id']}, attempt {found['attempt']}, {found['created']}{parent}",
        f"{len(found['tensors'])} tensors, {output.size(found['size_bytes'])} in {len(found['files'])} files",
    ]
    if found["ranks"]:
        own = sorted({part for rank in found["ranks"] for part in rank["parts"]})
        each = f"; each has its own {', '.join(own)}" if own else ""
        lines.append(f"saved by {1 + len(found['ranks'])} ranks{each}")
    if found["learning_rates"]:
        lines.append("learning rate " + ", ".join(map(value_in_words, found["learning_rates"])))
    if found["metrics"]:
        lines.append(output.metrics(found["metrics"]))
    if found["validation"] is not None and found["validation"]["passed"]:
        lines.append("validation passed")
    if found["against"] is not None:
        lines.append(f"{found['against']}: no run goes on from it by itself")
    return lines


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
    order = sorted(telling, key=lambda key: key not in _FIRST)
    return shortened(", ".join(f"{key} {value_in_words(telling[key])}" for key in order))


def _names(names: Sequence[str]) -> str:
    return shortened(f"{len(names)}: {', '.join(names)}")


def _tensor(row: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(str(length) for length in row["shape"]) or "scalar"
    size, aliases = output.size(row["size_bytes"]), ", ".join(row["aliases"])
    return (printable(row["path"]), row["dtype"], shape, size, row["file"], printable(aliases))
