"""Which run is meant: by path, by name, or by where the user is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.cli import output
from unbroken.errors import CheckpointNotFoundError, UsageError
from unbroken.rundir import layout

if TYPE_CHECKING:
    from unbroken.inspection.detect import CheckpointReader
    from unbroken.inspection.locate import Located
    from unbroken.supervisor.registry import KnownRun

RUNS_FOLDER = "runs"
_LISTED = "`unbroken status` lists the runs that are known"


def find_run(target: str | None) -> Path:
    """Return the absolute directory of the run that `target` means.

    A target is the path of a run directory, or the name of a run: first of one under `runs/` here,
    then of any that was started on this machine. Without one it is the current directory if that is a
    run, else the run that was started last.

    Raises UsageError if no run is meant, or several are.
    """
    return _default() if target is None else _given(target)


def is_run(directory: Path) -> bool:
    """Tell whether `directory` is that of a run."""
    return (directory / layout.RUN_FILE).is_file()


def absolute(path: Path) -> Path:
    """Return `path` from the root on, with symbolic links as the user wrote them."""
    return Path(os.path.abspath(path))


def _given(target: str) -> Path:
    for path in (Path(target), Path(RUNS_FOLDER) / target):
        if is_run(path):
            return absolute(path)
    found = [run.directory for run in _known_runs() if run.name == target]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{target}: expected one run of that name, found {len(found)}",
            hint=f"give its directory: {', '.join(str(directory) for directory in found)}",
        )
    if Path(target).is_dir():
        raise UsageError(
            f"{target}: expected a run directory, found no {layout.RUN_FILE} in it", hint=_LISTED
        )
    raise UsageError(f"{target}: no run of that name, and no such file or directory", hint=_LISTED)


def _default() -> Path:
    here = absolute(Path())
    if is_run(here):
        return here
    known = _known_runs()
    if not known:
        raise UsageError(
            "no run is known on this machine", hint="give a run directory, or start one with `unbroken run`"
        )
    if len(known) > 1:
        output.note(f"run {known[0].name} in {known[0].directory}, which was started last")
    return known[0].directory


def find_foreign(target: str | None) -> Path | None:
    """Return the path of a checkpoint that is in no run, if `target` is one: of any format but ours."""
    if target is None:
        return None
    from unbroken.inspection.detect import is_foreign

    path = Path(target)
    return path if not is_run(path) and is_foreign(path) else None


def open_target(target: str) -> CheckpointReader:
    """Return a reader of the checkpoint that `target` means.

    It is a file, or a directory of some format; the newest checkpoint of a run; or RUN:NAME for that one.
    """
    from unbroken.inspection.detect import open_checkpoint, open_located

    path = find_foreign(target)
    if path is not None:
        return open_checkpoint(path)
    run, separator, name = target.rpartition(":")
    if separator and not Path(target).exists():
        return open_located(find_checkpoint(run, name))
    return open_located(find_checkpoint(target))


def find_checkpoint(target: str | None, name: str | None = None) -> Located:
    """Return the checkpoint that `target` means: a checkpoint directory, or one of a run.

    Of a run it is the checkpoint `name`, or the newest one.
    """
    # Here, not at the top: commands that only need a run must not load what reads checkpoints.
    from unbroken.inspection.locate import is_checkpoint, locate_checkpoint, locate_in_run

    if target is not None and is_checkpoint(Path(target)):
        if name is not None:
            raise UsageError(
                f"{target}: expected a run before the checkpoint {name!r}, found a checkpoint",
                hint="give the checkpoint's directory alone, or its run and its name",
            )
        return locate_checkpoint(Path(target))
    return locate_in_run(find_run(target), name)


def find_checkpoints(target: str | None) -> list[Located]:
    """Return the checkpoint in the directory `target`, or all of the run that `target` means."""
    from unbroken.inspection.locate import is_checkpoint, locate_all, locate_checkpoint

    if target is not None and is_checkpoint(Path(target)):
        return [locate_checkpoint(Path(target))]
    directory = find_run(target)
    found = locate_all(directory)
    if not found:
        raise CheckpointNotFoundError(
            f"{directory}: expected a checkpoint, found none", hint="let the run save once"
        )
    return found


def _known_runs() -> list[KnownRun]:
    # Loaded here: a run that is given by its directory need not wait for it.
    from unbroken.supervisor.registry import known_runs

    return known_runs()
