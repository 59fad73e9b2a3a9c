"""What a supervisor keeps going, and how: handed to it when it starts, and kept for whoever takes over."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json
from unbroken.supervisor.restart_policy import RestartPolicy

# The fields of a plan that are values of their own.
_POLICIES: dict[str, type] = {"policy": RestartPolicy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep going: `command`, as the run in `directory`, an absolute path."""

    directory: Path
    command: tuple[str, ...]
    name: str | None = None
    grace_seconds: float = 120.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directory": str(self.directory), "command": list(self.command)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Return the plan written in `value`. Raises KeyError or TypeError if it is none."""
        policies = {name: kind(**value[name]) for name, kind in _POLICIES.items() if name in value}
        place = {"directory": Path(value["directory"]), "command": tuple(value["command"])}
        return cls(**{**value, **place, **policies})


def write_plan(plan: Plan) -> None:
    """Keep `plan` in its run directory. Raises StorageError."""
    write_json(plan.directory / layout.PLAN_FILE, plan.to_json())


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
