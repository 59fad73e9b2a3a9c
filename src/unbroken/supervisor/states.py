"""The snapshot of what a supervisor is doing: written at each change of state, read by `status`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.rundir.place import is_elsewhere, place_of
from unbroken.rundir.processes import ProcessIdentity, is_alive

# starting: an attempt is about to start.       done: training came to its end.
# running: an attempt runs.                     stopped: on request; run it again to go on.
# stopping: it was asked to save and stop.      held: a human is needed; it was not restarted.
# backing-off: waiting for the next attempt.    lost: the supervisor is gone, without a word.
State: TypeAlias = Literal[
    "starting", "running", "stopping", "backing-off", "done", "stopped", "held", "lost"
]
ENDED: frozenset[State] = frozenset({"done", "stopped", "held"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a supervisor does with its run. Times are seconds since 1970, counts are from its start.

    `exit_code` is what the run ended with, None before; `outcome` and `evidence` are of the last
    attempt that ended, `hint` goes with `reason`; `next_start_seconds` and `deadline_seconds` go with
    back-off and stopping.
    """

    state: State
    reason: str
    run_id: str
    name: str
    command: tuple[str, ...]
    supervisor: ProcessIdentity
    started_seconds: float
    changed_seconds: float
    grace_seconds: float
    attempt: int | None = None
    leader: ProcessIdentity | None = None
    restarts: int = 0
    next_start_seconds: float | None = None
    deadline_seconds: float | None = None
    outcome: str = ""
    evidence: tuple[str, ...] = ()
    hint: str = ""
    exit_code: int | None = None

    @property
    def is_live(self) -> bool:
        """True while a supervisor keeps the run going."""
        return self.state not in ENDED and self.state != "lost"

    @property
    def may_print(self) -> bool:
        """True while an attempt may write output: it outlives its supervisor."""
        if self.is_live or self.state != "lost" or self.leader is None:
            return self.is_live
        return is_alive(self.leader) is not False


def write_state(directory: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot of the run in `directory`."""
    value = {**asdict(snapshot), **place_of(directory)}
    value["supervisor"] = snapshot.supervisor.to_json()
    value["leader"] = snapshot.leader.to_json() if snapshot.leader is not None else None
    write_json(directory / layout.SUPERVISOR_FILE, value)


def read_state(directory: Path) -> Snapshot | None:
    """Return the snapshot of the run in `directory`, or None if no supervisor ever ran there.

    It says "lost" where the supervisor that wrote it is provably gone without having ended the run, and in
    a copy of a run directory, whose processes are all of the original.
    Raises StorageError if it cannot be read.
    """
    path = directory / layout.SUPERVISOR_FILE
    value = read_json(path)
    if value is None:
        return None
    snapshot = _parse(value)
    if snapshot is None:
        raise StorageError(
            f"{path}: expected the state of a supervisor, found something else",
            hint="it is rewritten when the run is started again",
        )
    if snapshot.is_live and is_elsewhere(value, directory):
        reason = f"this is a copy of {value['directory']}"
        return replace(snapshot, state="lost", reason=reason, leader=None)
    if snapshot.is_live and is_alive(snapshot.supervisor) is False:
        return replace(snapshot, state="lost", reason=f"its supervisor is gone; it was {snapshot.state}")
    return snapshot


def _parse(value: dict[str, Any]) -> Snapshot | None:
    supervisor = ProcessIdentity.from_json(value.get("supervisor") or {})
    if supervisor is None or value.get("state") not in get_args(State):
        return None
    leader = value.get("leader")
    # A newer release may say more; what this one knows of it is as it was.
    names = {field.name for field in fields(Snapshot)}
    try:
        return Snapshot(
            **{
                **{name: entry for name, entry in value.items() if name in names},
                "supervisor": supervisor,
                "leader": ProcessIdentity.from_json(leader) if leader else None,
                "command": tuple(value["command"]),
                "evidence": tuple(value["evidence"]),
            }
        )
    except (KeyError, TypeError):
        return None
