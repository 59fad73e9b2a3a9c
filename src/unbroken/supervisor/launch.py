"""Starting a supervisor as a process of its own that outlives whoever started it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.errors import UnbrokenError, UsageError
from unbroken.rundir import layout
from unbroken.supervisor.plan import Plan

# The option by which a supervisor takes a run over if it gets no plan.
TAKE_OVER = "--take-over"


def check_command(command: tuple[str, ...]) -> None:
    """Raise UsageError if the command cannot be started, before anything is made for it."""
    program = command[0]
    if shutil.which(program) is not None:
        return
    if os.path.dirname(program) and os.path.exists(program):
        problem = "is a directory" if os.path.isdir(program) else "is not executable"
        raise UsageError(
            f"{program}: it {problem}", hint=f"run it by its interpreter, or try `chmod +x {program}`"
        )
    raise UsageError(
        f"{program}: no such command", hint="check the spelling, and that its environment is active"
    )


def launch(plan: Plan) -> subprocess.Popen[bytes]:
    """Start the supervisor of `plan` and return its process once it keeps the run going.

    Raises the error that prevents it, as the supervisor reported it.
    """
    process = start(plan.directory, supervisor_command(plan.directory, takes_over=False))
    await_report(process, plan)
    return process


class NoReportError(UnbrokenError):
    """The supervisor ended, or what should have started it, before it could say anything."""


def supervisor_command(directory: Path, *, takes_over: bool) -> list[str]:
    """Return the command that starts the run in `directory` by a plan on stdin.

    Without a plan it is an error, or it `takes_over` the run that is there.
    """
    # -P: a json.py in the user's directory must not take the place of the library's.
    command = [sys.executable, "-P", "-m", "unbroken.supervisor", str(directory)]
    return [*command, TAKE_OVER] if takes_over else command


def start(directory: Path, command: list[str]) -> subprocess.Popen[bytes]:
    """Start `command`, which supervises the run in `directory`, in a session of its own."""
    environment = dict(os.environ)
    # Started from an attempt of this very run it must not look like one of its processes.
    if environment.get(layout.RUN_DIR_VARIABLE) == str(directory):
        environment.pop(layout.ATTEMPT_VARIABLE, None)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    )


def await_report(process: subprocess.Popen[bytes], plan: Plan | None) -> dict[str, Any]:
    """Hand `plan`, if there is one, to a supervisor that was started; return once it keeps the run going.

    Returns what it reports: `supervisor` is its process id, `found` what a run that it took over did. Raises
    the error that prevents it.
    """
    assert process.stdin is not None, "asked for a pipe"
    assert process.stdout is not None, "asked for a pipe"
    # Gone already, it says why on stdout.
    with suppress(BrokenPipeError), process.stdin as pipe:
        if plan is not None:
            pipe.write(json.dumps(plan.to_json()).encode())
    said = b""
    # Not to its end: a service manager keeps the other end open.
    with process.stdout as pipe:
        for line in pipe:
            said = line
            report = _report_in(line)
            if "supervisor" in report:
                return report
            if "error" in report:
                process.wait()
                raise _error(**report["error"])
    process.wait()
    last = said.decode(errors="replace").strip()
    raise NoReportError(
        f"the supervisor could not start: {last or 'it said nothing'}",
        hint=f"try it by hand: {sys.executable} -P -c 'import unbroken.supervisor.__main__'",
    )


def _report_in(line: bytes) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _error(kind: str, message: str, hint: str) -> UnbrokenError:
    found = next((error for error in _family(UnbrokenError) if error.kind == kind), UnbrokenError)
    return found(message, hint=hint)


def _family(parent: type[UnbrokenError]) -> Iterator[type[UnbrokenError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _family(child)
