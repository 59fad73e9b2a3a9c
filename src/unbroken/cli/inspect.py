"""`unbroken inspect`: what is in a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from unbroken.cli import output
from unbroken.cli.target import find_checkpoint
from unbroken.inspection.summary import summarize


@click.command()
@click.argument("target", required=False)
@click.argument("checkpoint", required=False)
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object, always with the tensors.")
def inspect(target: str | None, checkpoint: str | None, with_tensors: bool, as_json: bool) -> None:
    """Show what is in a checkpoint: a directory, or CHECKPOINT (default: the newest) of the run TARGET.

    The manifest is verified; tensors are not read, `unbroken verify` does that.

    \b
    Fields of --json:
      path, run_id, step, epoch, inside_epoch, samples (consumed of each loader), created, attempt,
      parent, format_version, size_bytes, learning_rates, metrics, config, environment,
      parts {name: type, handler, tensors, size_bytes}, files {name: size_bytes},
      tensors [path, dtype, shape, size_bytes, file, digest, aliases]
    """
    found = summarize(find_checkpoint(target, checkpoint))
    if as_json:
        output.data_json(found)
        return
    for line in _lines(found):
        output.data(line)
    output.data("")
    output.table(
        ("PART", "TYPE", "TENSORS", "SIZE"),
        [
            (name, part["type"], str(part["tensors"]), output.size(part["size_bytes"]))
            for name, part in found["parts"].items()
        ],
    )
    if with_tensors:
        output.data("")
        output.table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "FILE"), [_tensor(row) for row in found["tensors"]])


def _lines(found: dict[str, Any]) -> list[str]:
    where = "inside" if found["inside_epoch"] else "before"
    samples = [f"{count:,} samples consumed" for count in found["samples"] if count and found["inside_epoch"]]
    lines = [
        found["path"],
        f"step {found['step']}, " + ", ".join([f"{where} epoch {found['epoch']}", *samples]),
        f"run {found['run_id']}, attempt {found['attempt']}, {found['created']}",
        f"{len(found['tensors'])} tensors, {output.size(found['size_bytes'])} in {len(found['files'])} files",
    ]
    if found["learning_rates"]:
        lines.append("learning rate " + ", ".join(f"{rate:g}" for rate in found["learning_rates"]))
    if found["metrics"]:
        lines.append(output.metrics(found["metrics"]))
    return lines


def _tensor(row: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(str(length) for length in row["shape"]) or "scalar"
    return (row["path"], row["dtype"], shape, output.size(row["size_bytes"]), row["file"])
