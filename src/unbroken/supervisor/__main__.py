"""The process that supervises: `python -m unbroken.supervisor --directory D -- COMMAND...`.

`launch` starts it. It says on stdout, in one line of JSON, that it keeps the run going, or the error
that prevents it; then stdout and stderr go to supervisor.log and nobody needs to listen any more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.storage.failures import failed
from unbroken.supervisor.restart_policy import RestartPolicy
from unbroken.supervisor.stopping import block_signals
from unbroken.supervisor.supervisor import Plan, Supervisor


def main() -> int:
    """Supervise, and return the exit code of the run."""
    block_signals()
    plan = _parse(sys.argv[1:])
    try:
        supervisor = Supervisor(plan)
        log = _open_log(plan.directory)
    except UnbrokenError as error:
        report = {"kind": error.kind, "message": error.message, "hint": error.hint}
        print(json.dumps({"error": report}), flush=True)
        return error.exit_code
    print(json.dumps({"supervisor": os.getpid()}), flush=True)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return supervisor.run()


def _parse(arguments: list[str]) -> Plan:
    parser = argparse.ArgumentParser(prog="unbroken.supervisor")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--name")
    parser.add_argument("--grace", type=float, default=120.0)
    parser.add_argument("--backoff", type=float, default=1.0)
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    return Plan(
        directory=given.directory,
        command=tuple(given.command),
        name=given.name,
        grace_seconds=given.grace,
        policy=RestartPolicy(base_seconds=given.backoff, max_restarts=given.max_restarts),
    )


def _open_log(directory: Path) -> int:
    path = directory / layout.SUPERVISOR_LOG
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise failed("open", path, error) from error


if __name__ == "__main__":
    sys.exit(main())
