"""The process that supervises: `python -m unbroken.supervisor DIRECTORY`, with its plan in JSON on stdin.

`launch` starts it. It says on stdout, in one line of JSON, that it keeps the run going, or the error
that prevents it; then stdout and stderr go to supervisor.log and nobody needs to listen any more.

With `--take-over` and nothing on stdin it takes over the run in DIRECTORY, by the plan that is kept there.
So a service manager may start the same command once more after we were killed. Without that option, whoever
wanted to start a run was killed before it could say how.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.errors import NotRunningError, UnbrokenError, UsageError
from unbroken.rundir import layout
from unbroken.storage.failures import failed
from unbroken.supervisor import surroundings
from unbroken.supervisor.launch import TAKE_OVER
from unbroken.supervisor.plan import Plan, read_plan
from unbroken.supervisor.stopping import block_signals
from unbroken.supervisor.supervisor import Supervisor


def main(arguments: list[str]) -> int:
    """Supervise, and return the exit code of the run."""
    block_signals()
    given = sys.stdin.read()
    try:
        plan = Plan.from_json(json.loads(given)) if given else _kept_plan(*arguments)
        if plan.environment is not None:
            surroundings.enter(plan.working_directory, plan.environment)
        supervisor = Supervisor(plan, revives=not given)
        log = _open_log(plan.directory)
    except UnbrokenError as error:
        _report({"error": {"kind": error.kind, "message": error.message, "hint": error.hint}})
        return error.exit_code
    _report({"supervisor": os.getpid(), "found": supervisor.found})
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return supervisor.run()


def _kept_plan(place: str, option: str = "") -> Plan:
    directory = Path(place)
    if option != TAKE_OVER:
        raise UsageError(f"{directory}: expected a plan on stdin, found nothing", hint="use `unbroken run`")
    plan = read_plan(directory)
    if plan is None:
        raise NotRunningError(
            f"{directory}: no supervisor ever kept this run going, so there is nothing to take over",
            hint="start it with `unbroken run`",
        )
    # Where it lies, not where it lay when it was written: directories are moved.
    return replace(plan, directory=directory)


def _report(report: dict[str, Any]) -> None:
    # Whoever a service manager starts again has nobody to tell.
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(report).encode() + b"\n")


def _open_log(directory: Path) -> int:
    path = directory / layout.SUPERVISOR_LOG
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise failed("open", path, error) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
