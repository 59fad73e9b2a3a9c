"""Starting a supervisor as a process of its own that outlives whoever started it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

from unbroken.errors import UnbrokenError, UsageError
from unbroken.supervisor.plan import Plan


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
    # -P: a json.py in the user's directory must not take the place of the library's.
    arguments = [sys.executable, "-P", "-m", "unbroken.supervisor"]
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None, "asked for a pipe"
    assert process.stdout is not None, "asked for a pipe"
    # Gone already, it says why on stdout.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(plan.to_json()).encode())
    # It ends when the supervisor turns to its log, or dies.
    with process.stdout as pipe:
        said = pipe.read().decode(errors="replace")
    last = said.strip().rpartition("\n")[2]
    try:
        report = json.loads(last)
    except ValueError:
        report = {}
    if "supervisor" in report:
        return process
    process.wait()
    if "error" in report:
        raise _error(**report["error"])
    raise UnbrokenError(
        f"the supervisor could not start: {last or 'it said nothing'}",
        hint=f"try it by hand: {sys.executable} -P -c 'import unbroken.supervisor.__main__'",
    )


def _error(kind: str, message: str, hint: str) -> UnbrokenError:
    found = next((error for error in _family(UnbrokenError) if error.kind == kind), UnbrokenError)
    return found(message, hint=hint)


def _family(parent: type[UnbrokenError]) -> Iterator[type[UnbrokenError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _family(child)
