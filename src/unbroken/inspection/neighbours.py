"""What stands beside a checkpoint: half-written ones that a trainer would take first, pointers that lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unbroken.errors import DamagedError, StorageError, UnbrokenError
from unbroken.inspection.detect import is_foreign, open_checkpoint
from unbroken.inspection.doctor import Advice
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.inspection.formats.orbax import OrbaxDirectory
from unbroken.inspection.pointers import NUMBERED, STEP, number_of, numbered, pointed_to, pointer_in

# Trainers keep few; of more the newest are looked at.
_MOST_OPENED = 20


def advise(reader: CheckpointReader) -> list[Advice]:
    """Return what is to be known of the checkpoints beside that of `reader`. Their headers are read."""
    path = reader.path.absolute()
    if not path.is_dir():
        return []
    try:
        found = [*_of_the_pointer(path), *_best(reader, path)]
        for called in (NUMBERED, STEP) if isinstance(reader, OrbaxDirectory) else (NUMBERED,):
            if called.fullmatch(path.name):
                beside = numbered(path.parent, called)
                found += (_of_the_older if reader.problems else _of_the_newer)(path, beside)
    except StorageError:
        # Who may read the checkpoint need not be allowed to look at what is beside it.
        return []
    return found


def _of_the_newer(path: Path, beside: dict[int, Path]) -> Iterator[Advice]:
    newer = [folder for number, folder in beside.items() if number > number_of(path)]
    for folder in reversed(newer[-_MOST_OPENED:]):
        problem = _problem(folder)
        if problem is not None:
            yield Advice(
                severity="warning",
                text=f"{folder.name} is not whole, and a trainer that takes the last one takes that",
                evidence=problem,
                remedy=f"name {path.name} when training goes on, or move {folder.name} away",
            )
    if newer and not any(map(_problem, newer[-1:])):
        yield Advice(
            severity="note",
            text=f"{newer[-1].name} is newer, and whole",
            evidence=f"{len(newer)} newer ones beside it",
            remedy=f"unbroken doctor {newer[-1]}",
        )


def _of_the_older(path: Path, beside: dict[int, Path]) -> Iterator[Advice]:
    older = [folder for number, folder in beside.items() if number < number_of(path)]
    for folder in reversed(older[-_MOST_OPENED:]):
        if _problem(folder) is None:
            yield Advice(
                severity="note",
                text=f"{folder.name} is the newest before it that is whole",
                evidence="its headers say so",
                remedy=f"name {folder.name} when training goes on: a trainer takes the highest number",
            )
            return


def _of_the_pointer(path: Path) -> Iterator[Advice]:
    pointer = pointer_in(path.parent)
    if pointer is None:
        return
    try:
        named = pointed_to(pointer)
    except DamagedError as error:
        yield Advice(
            severity="warning",
            text=f"{pointer.name} beside it lies: nothing can be loaded by it",
            evidence=error.message,
            remedy=f"write {path.name} into {pointer}, or name it when training goes on",
        )
        return
    if named.name != path.name and is_foreign(named):
        yield Advice(
            severity="note",
            text=f"{pointer.name} beside it names {named.name}, and so that is what is loaded",
            evidence=str(pointer),
            remedy=f"unbroken doctor {named}",
        )


def _best(reader: CheckpointReader, path: Path) -> Iterator[Advice]:
    state = reader.values.get("trainer_state") if isinstance(reader.values, dict) else None
    best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    name = best.rstrip("/").rpartition("/")[2] if isinstance(best, str) else ""
    if name and "\x00" not in name and not (path.parent / name).is_dir():
        yield Advice(
            severity="note",
            text=f"its best checkpoint, {name}, is not there any more",
            evidence=f"best_model_checkpoint in {path / 'trainer_state.json'}",
            remedy="training goes on all the same; the best model cannot be loaded at its end",
        )


def _problem(folder: Path) -> str | None:
    """Return what is wrong with a folder, None if it is whole as far as headers tell."""
    try:
        problems = open_checkpoint(folder).problems
    except UnbrokenError as error:
        return error.message
    return f"{problems[0].file}: {problems[0].problem}" if problems else None
