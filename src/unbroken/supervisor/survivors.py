"""Processes of a run that live on without a supervisor."""

from __future__ import annotations

from pathlib import Path

from unbroken.errors import RunBusyError, StorageError
from unbroken.rundir.adopted_tree import tagged
from unbroken.rundir.processes import is_alive
from unbroken.supervisor.cells import living_in_cells
from unbroken.supervisor.states import read_state


def refuse_beside_survivors(directory: Path) -> None:
    """Raise RunBusyError if a process of an earlier attempt of the run in `directory` lives.

    A supervisor that was killed leaves its attempt running; a second copy beside it would be the
    worst that can happen to a run. Attempts are known by their environment, which they inherit on, by
    their control groups, which they cannot leave, and by what the last supervisor said of their leader.
    """
    found = sorted({*tagged(directory), *living_in_cells(directory), *_leader(directory)})
    if found:
        who = ", ".join(f"process {process_id} (attempt {attempt})" for process_id, attempt in found)
        raise RunBusyError(
            f"{directory}: an earlier attempt still runs without a supervisor: {who}",
            hint=f"`unbroken revive {directory}` keeps it going; or end it with "
            f"`kill {' '.join(str(process_id) for process_id, _ in found)}`",
        )


def _leader(directory: Path) -> list[tuple[int, int]]:
    try:
        snapshot = read_state(directory)
    except StorageError:
        return []
    if snapshot is None or snapshot.leader is None or not is_alive(snapshot.leader):
        return []
    return [(snapshot.leader.process_id, snapshot.attempt or 0)]
