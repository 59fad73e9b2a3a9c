"""`unbroken export`: the weights of a checkpoint as one safetensors file, for use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import click

from unbroken.checkpoint.retention import KeepBest
from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.cli.values import printable
from unbroken.errors import UsageError
from unbroken.inspection.exporting import Export
from unbroken.inspection.exporting import export as export_weights


@click.command()
@click.argument("run")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--latest", is_flag=True, help="The newest checkpoint that is good; so it is by default.")
@click.option("--best", metavar="METRIC", help="The one with the best METRIC.")
@click.option("--mode", type=click.Choice(["max", "min"]), help="Which METRIC is best; max by default.")
@click.option("--checkpoint", metavar="NAME", help="The checkpoint NAME, whatever is known against it.")
@click.option("--part", metavar="NAME", help="The module, if there are several.")
@click.option("--replace", is_flag=True, help="Put it in the place of a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def export(run: str, target: Path, *, as_json: bool, part: str | None, replace: bool, **choice: Any) -> None:
    """Write the weights of a module in a checkpoint of RUN to TARGET.safetensors.

    By default it is the newest checkpoint. One that holds NaN, that the check of the script did not pass,
    that the run was rolled back from or that is damaged is passed over, and that is said on stderr. Every
    byte is held against its digest, and TARGET is there as a whole or not at all.

    \b
    Fields of --json:
      run, file, checkpoint, step, metrics, part, tensors, size_bytes,
      tied (name that is left out -> name that it is one tensor with), dropped [text],
      passed_over (checkpoint -> reason), against (what is known against the one named, or null)
    """
    directory = find_run(run)
    done = export_weights(directory, target, part=part, replace=replace, **_chosen(**choice))
    for name, reason in done.passed_over.items():
        output.note(printable(f"{name} is passed over: {reason}"))
    if done.against is not None:
        output.note(printable(f"{done.checkpoint} is exported as asked, but {done.against}"))
    for text in done.dropped:
        output.note(printable(f"not exported: {text}"))
    if as_json:
        output.data_json({"run": str(directory), **dataclasses.asdict(done), "file": str(done.file)})
        return
    output.data(printable(_line(done)))


def _chosen(
    *, latest: bool, best: str | None, mode: Literal["max", "min"] | None, checkpoint: str | None
) -> dict[str, Any]:
    if latest + (best is not None) + (checkpoint is not None) > 1:
        raise UsageError(
            "expected one of --latest, --best and --checkpoint, found several", hint="choose one of them"
        )
    if mode is not None and best is None:
        raise UsageError("expected --best METRIC with --mode, found none", hint="name the metric")
    return {"name": checkpoint, "best": None if best is None else KeepBest(1, best, mode or "max")}


def _line(done: Export) -> str:
    words = [f"step {done.step}", *([output.metrics(done.metrics)] if done.metrics else [])]
    size = f"{done.tensors} tensors, {output.size(done.size_bytes)}"
    return f"{done.file}  {done.part} of {done.checkpoint} ({', '.join(words)}), {size}"
