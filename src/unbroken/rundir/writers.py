"""Writer processes that outlived their trainers: they have a last checkpoint to write."""

from __future__ import annotations

import time
from pathlib import Path

from unbroken.errors import RunBusyError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.processes import ProcessIdentity, identify_self, is_alive
from unbroken.rundir.tell import tell

_WAIT_SECONDS = 600.0
_LOOK_SECONDS = 0.02
_SAY_AFTER_SECONDS = 1.0


def orphaned_writer(attempt_directory: Path) -> ProcessIdentity | None:
    """Return the writer process of that attempt if it lives, on this host, and its trainer does not."""
    words = read_json(attempt_directory / layout.WRITER_PROCESS)
    writer = None if words is None else ProcessIdentity.from_json(words)
    if writer is None or not is_alive(writer):
        return None
    words = read_json(attempt_directory.parents[1] / layout.WRITER_FILE)
    trainer = None if words is None else ProcessIdentity.from_json(words)
    # This very process is no trainer yet: it may have been one, before it replaced itself by exec.
    lives = trainer is not None and trainer != identify_self() and is_alive(trainer)
    return None if lives else writer


def wait_for_writers(run_directory: Path) -> None:
    """Return when no writer process of an earlier attempt has outlived its trainer.

    Raises RunBusyError if one does not come to its end.
    """
    for attempt in _newest_attempts(run_directory):
        _wait_for_writer(run_directory, attempt)


def has_orphaned_writer(run_directory: Path) -> bool:
    """Tell whether there is one to wait for."""
    newest = _newest_attempts(run_directory)
    return any(orphaned_writer(layout.attempt_directory(run_directory, number)) for number in newest)


def _newest_attempts(run_directory: Path) -> list[int]:
    # The newest may be the one that a supervisor has just made for us.
    return layout.attempts(run_directory)[-2:]


def _wait_for_writer(run_directory: Path, attempt: int) -> None:
    since, said = time.monotonic(), False
    while (writer := orphaned_writer(layout.attempt_directory(run_directory, attempt))) is not None:
        waited = time.monotonic() - since
        if waited > _WAIT_SECONDS:
            raise RunBusyError(
                f"{run_directory}: process {writer.process_id} has been writing the last checkpoint of "
                f"attempt {attempt} for {_WAIT_SECONDS:.0f} seconds",
                hint=f"look at the disk; if it hangs, end it with `kill -9 {writer.process_id}`",
            )
        if not said and waited > _SAY_AFTER_SECONDS:
            said = True
            tell(f"waiting for process {writer.process_id}, which writes the last checkpoint")
        time.sleep(_LOOK_SECONDS)
