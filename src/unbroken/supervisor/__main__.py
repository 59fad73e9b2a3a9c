"""The process that supervises: `python -m unbroken.supervisor`, with its plan in JSON on stdin.

`launch` starts it. It says on stdout, in one line of JSON, that it keeps the run going, or the error
that prevents it; then stdout and stderr go to supervisor.log and nobody needs to listen any more.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.storage.failures import failed
from unbroken.supervisor.plan import Plan
from unbroken.supervisor.stopping import block_signals
from unbroken.supervisor.supervisor import Supervisor


def main() -> int:
    """Supervise, and return the exit code of the run."""
    block_signals()
    plan = Plan.from_json(json.load(sys.stdin))
    try:
        supervisor = Supervisor(plan)
        log = _open_log(plan.directory)
    except UnbrokenError as error:
        report = {"kind": error.kind, "message": error.message, "hint": error.hint}
        print(json.dumps({"error": report}), flush=True)
        return error.exit_code
    print(json.dumps({"supervisor": os.getpid()}), flush=True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return supervisor.run()


def _open_log(directory: Path) -> int:
    path = directory / layout.SUPERVISOR_LOG
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise failed("open", path, error) from error


if __name__ == "__main__":
    sys.exit(main())
