"""Processes of a run that live on without a supervisor."""

from __future__ import annotations

import os
from pathlib import Path

from unbroken.errors import RunBusyError
from unbroken.rundir import layout
from unbroken.rundir.processes import read_stat


def refuse_beside_survivors(directory: Path) -> None:
    """Raise RunBusyError if a process of an earlier attempt of the run in `directory` lives.

    A supervisor that was killed leaves its attempt running; a second copy beside it would be the
    worst that can happen to a run. Attempts are known by their environment, which they inherit on.
    """
    found = _tagged(directory)
    if found:
        who = ", ".join(f"process {process_id} (attempt {attempt})" for process_id, attempt in found)
        raise RunBusyError(
            f"{directory}: an earlier attempt still runs without a supervisor: {who}",
            hint=f"wait for it, or end it with `kill {' '.join(str(process_id) for process_id, _ in found)}`",
        )


def _tagged(directory: Path) -> list[tuple[int, int]]:
    run_tag = os.fsencode(f"{layout.RUN_DIR_VARIABLE}={directory}")
    attempt_tag = os.fsencode(f"{layout.ATTEMPT_VARIABLE}=")
    ourselves = _ancestors()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in ourselves:
            continue
        try:
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            # Gone meanwhile, or of another user and so not ours.
            continue
        numbers = [text[len(attempt_tag) :] for text in variables if text.startswith(attempt_tag)]
        # Both tags: a user may have set the directory in a shell.
        if run_tag in variables and numbers and numbers[0].isdigit():
            found.append((int(entry), int(numbers[0])))
    return sorted(found)


def _ancestors() -> set[int]:
    found = set()
    above = read_stat(os.getpid())
    while above is not None:
        found.add(above.process_id)
        above = read_stat(above.parent_id)
    return found
