"""`unbroken verify`: is every byte what was written?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from unbroken.checkpoint.verify import Verification, verify_checkpoint
from unbroken.cli import checks, output
from unbroken.cli.target import find_checkpoints, find_foreign
from unbroken.cli.values import printable
from unbroken.errors import EXIT_DAMAGED, DamagedError


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of objects, oldest first.")
def verify(target: str | None, as_json: bool) -> None:
    """Read every byte of TARGET, a checkpoint or all checkpoints of a run, against its digest.

    Of a checkpoint of another library every byte is held against the checksums that its format carries,
    and its layout is checked; it says so if there are none. Repairs nothing. Exits with 3 if anything is
    damaged.

    \b
    Fields of --json:
      name, path, intact (null: no checksum, nothing wrong), files, tensors, size_bytes,
      findings [file, problem], and of other libraries format, checksums
    """
    path = find_foreign(target)
    rows = _verify_foreign(path) if path is not None else _verify_ours(target)
    if as_json:
        output.data_json(rows)
    else:
        for row in rows:
            _show(row)
    if any(row["intact"] is False for row in rows):
        click.get_current_context().exit(EXIT_DAMAGED)


def _verify_ours(target: str | None) -> list[dict[str, Any]]:
    return [
        _fields(str(located.directory), verify_checkpoint(located.storage, located.tree))
        for located in find_checkpoints(target)
    ]


def _verify_foreign(path: Path) -> list[dict[str, Any]]:
    # Loaded here: our own checkpoints need none of it.
    from unbroken.inspection.detect import open_checkpoint

    row: dict[str, Any] = {"name": path.name, "path": str(path), "intact": False}
    try:
        reader = open_checkpoint(path)
        check = checks.of_others(reader)
    except DamagedError as error:
        found = {"file": path.name, "problem": error.message.removeprefix(f"{path}: ")}
        return [{**row, "files": 0, "tensors": 0, "size_bytes": 0, "findings": [found]}]
    return [
        {
            **row,
            # Of several in a directory it is the last.
            **({"name": reader.path.name, "path": str(reader.path)} if reader.path.is_dir() else {}),
            "intact": check["intact"],
            "files": len(reader.files),
            "tensors": len(reader.tensors),
            "size_bytes": reader.size_bytes,
            "findings": check["findings"],
            "format": reader.format,
            "checksums": check["checksums"],
        }
    ]


def _show(row: dict[str, Any]) -> None:
    name = printable(row["name"])
    if row["intact"] is False:
        output.data(f"{name}  {output.painted('DAMAGED', 'red', sys.stdout)}")
        for finding in row["findings"]:
            output.data(printable(f"  {finding['file']}: {finding['problem']}"))
        return
    words = f"{row['tensors']} tensors, {output.size(row['size_bytes'])}"
    if row["intact"]:
        by = f" ({row['checksums']})" if "checksums" in row else ""
        output.data(f"{name}  intact  {words}{by}")
        return
    output.data(f"{name}  complete  {words}")
    output.data(f"  {row['format']} carries no checksum: its layout is sound, of its values nobody can tell")


def _fields(path: str, found: Verification) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": path,
        "intact": found.is_intact,
        "files": found.files,
        "tensors": found.tensors,
        "size_bytes": found.size_bytes,
        "findings": checks.plain(found.findings),
    }
