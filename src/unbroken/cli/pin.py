"""`unbroken pin`: name the checkpoints that no prune deletes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from unbroken.checkpoint import pins
from unbroken.checkpoint.listing import list_names
from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import UsageError
from unbroken.inspection.locate import locate_in_run
from unbroken.storage.local import LocalStorage

_HEADER = ("CHECKPOINT", "PINNED (UTC)", "NOTE")


@click.command()
@click.argument("run")
@click.argument("checkpoint", required=False)
@click.option("--note", metavar="TEXT", help="Why, for whoever looks later.")
@click.option("--remove", is_flag=True, help="Remove the pin; the checkpoint may be pruned again.")
@click.option("--list", "as_list", is_flag=True, help="List what is pinned.")
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of all pins, after the change.")
def pin(run: str, checkpoint: str | None, as_list: bool, as_json: bool, **change: Any) -> None:
    """Pin CHECKPOINT of RUN, a name or a directory: no prune deletes it, nor does the run itself.

    A run that is going on obeys from its next prune on.

    \b
    Fields of --json:
      name, note, pinned (time in UTC), is_there (false if the checkpoint is no longer in its place)
    """
    if change["remove"] and change["note"] is not None:
        raise UsageError(
            "expected --remove or --note, found both", hint="a pin that is removed needs no note"
        )
    directory = find_run(run)
    storage = LocalStorage(directory)
    if checkpoint is not None:
        _change(directory, storage, checkpoint, **change)
    elif change["remove"] or change["note"] is not None or not (as_list or as_json):
        raise UsageError(
            f"{directory}: expected the name of a checkpoint to pin, found none",
            hint="`unbroken ls` lists the checkpoints of a run, `unbroken pin RUN --list` what is pinned",
        )
    if as_list or as_json:
        _show(storage, as_json=as_json)


def _change(directory: Path, storage: LocalStorage, name: str, *, note: str | None, remove: bool) -> None:
    if not remove:
        locate_in_run(directory, name)
        pins.pin(storage, name, note or "", exists=lambda name: name in list_names(storage))
        output.note(f"{name} is pinned: no prune deletes it")
    elif pins.unpin(storage, name) is not None:
        output.note(f"{name} is no longer pinned")
    else:
        known = ", ".join(pins.read_pins(storage)) or "none"
        raise UsageError(
            f"{directory}: expected a pinned checkpoint, found that {name!r} is not; pinned: {known}",
            hint="`unbroken pin RUN --list` lists what is pinned",
        )


def _show(storage: LocalStorage, *, as_json: bool) -> None:
    found = pins.read_pins(storage)
    there = set(list_names(storage))
    if as_json:
        output.data_json([_fields(one, one.name in there) for one in found.values()])
    elif found:
        output.table(_HEADER, [_cells(one, one.name in there) for one in found.values()])
    else:
        output.note(f"{storage.root}: nothing is pinned")


def _fields(one: pins.Pin, is_there: bool) -> dict[str, Any]:
    return {"name": one.name, "note": one.note, "pinned": one.pinned, "is_there": is_there}


def _cells(one: pins.Pin, is_there: bool) -> tuple[str, ...]:
    return (one.name, one.pinned[:19].replace("T", " "), one.note + ("" if is_there else " (not there)"))
