"""`unbroken inspect`: what is in a checkpoint."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unbroken.cli import output, tensors
from unbroken.cli.target import find_checkpoint, find_foreign
from unbroken.cli.values import Section, printable, section
from unbroken.errors import EXIT_DAMAGED, UsageError

if TYPE_CHECKING:
    from unbroken.inspection.detect import CheckpointReader


@click.command()
@click.argument("target", required=False)
@click.argument("checkpoint", required=False)
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option("--tree", "with_tree", is_flag=True, help="Show the paths of tensors as a tree, with sizes.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="No more than N levels of the tree.")
@click.option(
    "--match", "patterns", multiple=True, metavar="PATTERN", help="Only tensors that fit; repeatable."
)
@click.option("--values", "with_values", is_flag=True, help="Read every tensor: its range, mean, NaN, zeros.")
@click.option("--verify", "with_check", is_flag=True, help="Read every byte, as `unbroken verify` does.")
@click.option("--html", metavar="FILE", help="Write an HTML page to look at instead; - is stdout.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object, always with the tensors.")
def inspect(target: str | None, checkpoint: str | None, **asked: Any) -> None:
    """Show what is in a checkpoint: a path, or CHECKPOINT (default: the newest) of the run TARGET.

    The manifest is verified; tensors are not read but with --values. A path may be of
    another library: a file of torch.save (its pickle is read, never executed), safetensors, .npz.
    Exits with 3 if it is damaged or incomplete.

    In a PATTERN, * stands for any letters, / and . too. It is for tensors by any of their names, in tables,
    --tree, --json and --html, and --values reads no others.

    The page of --html is one file without scripts, which needs no network: what it is, its parts and all
    tensors by size, and the tensors as a tree that folds. An older page of that name is replaced.

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
    wish = _Asked(**asked)
    if wish.html is not None and wish.as_json:
        raise UsageError("expected --html or --json, found both", hint="ask for one after the other")
    if wish.depth is not None and not wish.with_tree:
        raise UsageError("expected --tree with --depth, found none", hint="add --tree")
    if wish.html is not None:
        # Loaded here: only pages need it.
        from unbroken.cli import picture

        picture.check_place(wish.html)
    path = find_foreign(target) if checkpoint is None else None
    with _without_collection():
        seen = _ours(target, checkpoint) if path is None else _foreign(path)
        _show(seen, wish)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options."""

    with_tensors: bool
    with_tree: bool
    depth: int | None
    patterns: Sequence[str]
    with_values: bool
    with_check: bool
    html: str | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A checkpoint that was found: what --json shows of it, and how the rest of it is had.

    `place` is the key of where each tensor lies.
    """

    found: dict[str, Any]
    place: str
    lines: Callable[[dict[str, Any]], list[str]]
    sections: Callable[[dict[str, Any]], list[Section]]
    reader: Callable[[], CheckpointReader]
    check: Callable[[], dict[str, Any]]


def _ours(target: str | None, checkpoint: str | None) -> _Seen:
    # Loaded here: checkpoints of other libraries need none of it.
    from unbroken.cli import checks, ours
    from unbroken.inspection.detect import open_located
    from unbroken.inspection.summary import summarize

    located = find_checkpoint(target, checkpoint)
    return _Seen(
        found=summarize(located),
        place="file",
        lines=ours.lines,
        sections=ours.sections,
        reader=lambda: open_located(located),
        check=lambda: checks.of_ours(located),
    )


def _foreign(path: Path) -> _Seen:
    # Loaded here: our own checkpoints need none of it.
    from unbroken.cli import checks, foreign
    from unbroken.inspection.detect import open_checkpoint
    from unbroken.inspection.foreign import describe

    reader = open_checkpoint(path)
    return _Seen(
        found=describe(reader),
        place="where",
        lines=foreign.lines,
        sections=foreign.sections,
        reader=lambda: reader,
        check=lambda: checks.of_others(reader),
    )


def _show(seen: _Seen, asked: _Asked) -> None:
    found = seen.found
    # Before any tensor is left out: they say what the whole checkpoint is.
    lines, sections = ([], []) if asked.as_json else (seen.lines(found), seen.sections(found))
    all_of_them = len(found["tensors"])
    found["tensors"] = tensors.matching(found["tensors"], asked.patterns)
    if asked.patterns:
        fit = f"{len(found['tensors'])} of {all_of_them} tensors fit {' '.join(asked.patterns)}"
        lines.append(printable(f"{fit}: no others are shown"))
    if asked.with_check:
        found["verification"] = seen.check()
    # Of what is damaged, numbers tell nothing.
    is_readable = not asked.with_check or found["verification"]["intact"] is not False
    with_values = asked.with_values and is_readable
    if with_values:
        from unbroken.cli import numbers

        add = numbers.add if asked.html is None else numbers.add_with_histograms
        add(seen.reader(), found["tensors"])
    if asked.as_json:
        output.data_json(found)
    elif asked.html is not None:
        from unbroken.cli import picture

        picture.write(asked.html, found, lines=lines, sections=sections)
    else:
        _print(seen, asked, lines, sections)
        if with_values:
            numbers.show(found["tensors"])
    if not found.get("complete", True) or not is_readable:
        click.get_current_context().exit(EXIT_DAMAGED)


def _print(seen: _Seen, asked: _Asked, lines: Sequence[str], sections: Sequence[Section]) -> None:
    found = seen.found
    for line in lines:
        output.data(line)
    for problem in found.get("problems", ()):
        output.data(printable(f"  {problem['file']}: {problem['problem']}"))
    if asked.with_check:
        _print_check(found["verification"])
    for _, header, rows in sections:
        section(header, rows)
    if asked.with_tensors:
        tensors.show(found["tensors"], seen.place)
    if asked.with_tree:
        tensors.show_tree(found["tensors"], asked.depth)


def _print_check(check: dict[str, Any]) -> None:
    from unbroken.cli import checks

    words = checks.in_words(check)
    output.data(output.painted(words, "red", sys.stdout) if check["intact"] is False else words)
    for one in check["findings"]:
        output.data(printable(f"  {one['file']}: {one['problem']}"))


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
