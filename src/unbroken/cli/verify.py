"""`unbroken verify`: is every byte what was written?"""

from __future__ import annotations

import sys
from typing import Any

import click

from unbroken.checkpoint.verify import Verification, verify_checkpoint
from unbroken.cli import output
from unbroken.cli.target import find_checkpoints
from unbroken.errors import EXIT_DAMAGED


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of objects, oldest first.")
def verify(target: str | None, as_json: bool) -> None:
    """Read every byte of TARGET, a checkpoint directory or all checkpoints of a run, against its digest.

    Repairs nothing. Exits with 3 if anything is damaged.

    \b
    Fields of --json:
      name, path, intact, files, tensors, size_bytes, findings [file, problem]
    """
    results = [
        (located, verify_checkpoint(located.storage, located.tree)) for located in find_checkpoints(target)
    ]
    if as_json:
        output.data_json([_fields(str(located.directory), found) for located, found in results])
    else:
        for _, found in results:
            _show(found)
    if not all(found.is_intact for _, found in results):
        click.get_current_context().exit(EXIT_DAMAGED)


def _show(found: Verification) -> None:
    if found.is_intact:
        output.data(f"{found.name}  intact  {found.tensors} tensors, {output.size(found.size_bytes)}")
        return
    output.data(f"{found.name}  {output.painted('DAMAGED', 'red', sys.stdout)}")
    for finding in found.findings:
        output.data(f"  {finding.file}: {finding.problem}")


def _fields(path: str, found: Verification) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": path,
        "intact": found.is_intact,
        "files": found.files,
        "tensors": found.tensors,
        "size_bytes": found.size_bytes,
        "findings": [{"file": finding.file, "problem": finding.problem} for finding in found.findings],
    }
