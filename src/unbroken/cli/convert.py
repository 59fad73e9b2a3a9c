"""`unbroken convert`: a checkpoint of any format in another, with JSON for what is no tensor."""

from __future__ import annotations

from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import open_target
from unbroken.cli.values import printable
from unbroken.inspection.conversion import convert as convert_checkpoint


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .keras of the same model: TARGET gets its configuration.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def convert(source: str, target: Path, like: Path | None, as_json: bool) -> None:
    """Write the tensors of SOURCE to TARGET, and everything else to a JSON file beside it.

    The end of TARGET says the format: .safetensors, or .index for a checkpoint of TensorFlow, whose data
    file is written beside it and which holds variables by their names, or .weights.h5 for Keras, which
    load_weights takes if SOURCE is a run with one model of Keras, or .keras, which load_model takes: --like
    is a file of the same model that Keras has written, for its configuration; all weights are compared.

    SOURCE is a path of a checkpoint, of any format that `unbroken inspect` shows; a run (its newest
    checkpoint), or RUN:NAME. No pickle is executed. Nothing is overwritten; what has no place in the
    new files is said on stderr.

    \b
    Fields of --json:
      source, format, files [path], tensors, size_bytes, dropped [text]
    """
    reader = open_target(source)
    done = convert_checkpoint(reader, target, like=like)
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
