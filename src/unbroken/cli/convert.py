"""`unbroken convert`: a checkpoint of any format in another, with JSON for what is no tensor."""

from __future__ import annotations

from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import open_target
from unbroken.cli.values import printable
from unbroken.inspection.casting import CASTS
from unbroken.inspection.conversion import convert as convert_checkpoint
from unbroken.inspection.rename_file import read_rename


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .keras of the same model: TARGET gets its configuration.",
)
@click.option(
    "--rename",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='A JSON object {"old": "new"}: names, or their first segments.',
)
@click.option(
    "--dtype",
    type=click.Choice(CASTS, case_sensitive=False),
    help="Round floating-point numbers to this one; integers stay.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def convert(
    source: str, target: Path, like: Path | None, rename: Path | None, dtype: str | None, as_json: bool
) -> None:
    """Write the tensors of SOURCE to TARGET, and everything else to a JSON file beside it.

    The end of TARGET says the format: .safetensors; .pt, which torch.load takes with weights_only; .npz for
    NumPy; .index for a checkpoint of TensorFlow, whose data file is written beside it and which holds
    variables by their names; .weights.h5 for Keras, which load_weights takes if SOURCE is a run with one
    model of Keras; or .keras, which load_model takes: --like is a file of the same model that Keras has
    written, for its configuration; all weights are compared.

    --rename gives names as for Run, with slashes or dots between their segments: the longest rule that fits
    counts, and what becomes "" is cut off. --dtype rounds to the nearest number, ties to even; NaN stays NaN,
    and tensors in which numbers became infinite are named.

    SOURCE is a path of a checkpoint, of any format that `unbroken inspect` shows; a run (its newest
    checkpoint), or RUN:NAME. No pickle is executed. Nothing is overwritten; what has no place in the
    new files is said on stderr.

    \b
    Fields of --json:
      source, format, files [path], tensors, size_bytes, dropped [text]
    """
    reader = open_target(source)
    names = None if rename is None else read_rename(rename)
    done = convert_checkpoint(reader, target, like=like, rename=names, dtype=dtype)
    for text in done.dropped:
        output.note(printable(f"not as it was: {text}"))
    files = [str(file) for file in done.files]
    if as_json:
        fields = {"tensors": done.tensors, "size_bytes": done.size_bytes, "dropped": list(done.dropped)}
        output.data_json({"source": str(reader.path), "format": reader.format, "files": files, **fields})
        return
    output.data(f"{files[0]}  {done.tensors} tensors, {output.size(done.size_bytes)}")
    for file in files[1:-1]:
        output.data(f"{file}  its data")
    output.data(f"{files[-1]}  all else")
