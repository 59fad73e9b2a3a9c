"""What a supervisor keeps going, and how: handed to it when it starts, and kept for whoever takes over."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.supervisor.hangs.hang_policy import HangPolicy
from unbroken.supervisor.restart_policy import RestartPolicy

# The fields of a plan that are values of their own.
_POLICIES: dict[str, type] = {"policy": RestartPolicy, "hang": HangPolicy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep going: `command`, as the run in `directory`, an absolute path.

    It is run in `working_directory`, with `environment`; None is that of the supervisor.
    """

    directory: Path
    command: tuple[str, ...]
    name: str | None = None
    working_directory: str = ""
    environment: dict[str, str] | None = None
    grace_seconds: float = 120.0
    # The cloud whose notices are watched: its name, "auto" by the machine's firmware, or "off".
    notices: str = "auto"
    # After a preemption the job goes back into the queue of Slurm.
    requeue: bool = False
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    hang: HangPolicy = field(default_factory=HangPolicy)
    log_limit_bytes: int = 1_000_000_000
    notify: tuple[str, ...] = ()
    # Only for the start: what an earlier one has learned about the sizes of batches is forgotten.
    whole_batches: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directory": str(self.directory), "command": list(self.command)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Return the plan written in `value`. Raises KeyError or TypeError if it is none."""
        policies = {name: kind(**value[name]) for name, kind in _POLICIES.items() if name in value}
        place = {"directory": Path(value["directory"]), "command": tuple(value["command"])}
        if "notify" in value:
            place["notify"] = tuple(value["notify"])
        return cls(**{**value, **place, **policies})


def write_plan(plan: Plan) -> None:
    """Keep `plan` in its run directory, readable by its owner only. Raises StorageError."""
    # Environments hold passwords. Only the thread that renews the lease is beside us, and makes no file.
    before = os.umask(0o077)
    try:
        write_json(plan.directory / layout.PLAN_FILE, plan.to_json())
    finally:
        os.umask(before)


def read_plan(directory: Path) -> Plan | None:
    """Return the plan by which the run in `directory` was last kept going, or None if it never was.

    Raises StorageError if it cannot be read.
    """
    path = directory / layout.PLAN_FILE
    value = read_json(path)
    if value is None:
        return None
    try:
        return Plan.from_json(value)
    except (KeyError, TypeError) as error:
        raise StorageError(
            f"{path}: expected the plan of a supervisor, found something else ({error})",
            hint="start the run again with `unbroken run`; its checkpoints are untouched",
        ) from error
