"""One process of the script that is rehearsed, from its start to the proof that nothing of it is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from unbroken.errors import RunBusyError
from unbroken.rundir import layout
from unbroken.rundir.process_tree import ProcessTree, spawn
from unbroken.rundir.rehearsal import PLAN_VARIABLE, Kill, Line, Plan, read_record, write_plan
from unbroken.rundir.writers import has_orphaned_writer

_LOOK_SECONDS = 0.02
_TERM_SECONDS = 1.0
_KILL_SECONDS = 60.0
# A writer that outlived its trainer has a last checkpoint to write, as in life.
_WRITE_SECONDS = 600.0
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 20
_NOT_KEPT = "unbroken: not kept: "
# What a process ends with that obeys a request to stop, or leaves it to Python or a shell.
_OBEYED = {"SIGTERM": (75, 143, -15), "SIGINT": (75, 130, -2), "SIGKILL": (-9, 137)}

End = Literal["complete", "killed", "not-reached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a process left: its lines, and `code`, minus the signal if one ended it.

    It is None if the process had to be ended because `silent_seconds` went by without a line. `not_kept` is
    what the run said of itself that it does not keep.
    """

    plan: Plan
    lines: tuple[Line, ...]
    code: int | None
    silent_seconds: float
    output: str
    not_kept: tuple[str, ...] = ()
    seconds: float

    @property
    def began_at(self) -> int | None:
        """The step that it went on from; None if it never came to its first step."""
        return next((line.step for line in self.lines if line.kind == "began"), None)

    @property
    def reached(self) -> int:
        """The last step that it completed or went on from."""
        return max((line.step for line in self.lines), default=0)


class UnplannedEndError(Exception):
    """A process did not end as its plan says; `output` is the end of what it printed."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(what)
        self.what = what
        self.output = output


class Folders:
    """Gives each process a folder of its own below `root`, for its plan, its record and its output."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._count = 0

    def new(self) -> Path:
        self._count += 1
        folder = self.root / f"process-{self._count:03d}"
        folder.mkdir(parents=True)
        return folder


def run_process(
    command: Sequence[str],
    plan: Plan,
    folder: Path,
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    watch: Callable[[int], None],
) -> Ended:
    """Run `command` by `plan` to its end, with its output in `folder`, and end what it leaves behind.

    `watch` is told the number of steps as it grows. After `timeout_seconds` without a new line in the
    record it is ended. Raises OSError if it cannot be started, RunBusyError if it cannot be ended.
    """
    write_plan(plan, folder / "plan.json")
    output, started = folder / "output.log", time.monotonic()
    told = {**environment, PLAN_VARIABLE: str(folder / "plan.json")}
    tree = ProcessTree(spawn(command, environment=told, output=output))
    term_seconds, is_hung = 0.0, False
    try:
        is_hung = not _wait(tree, Path(plan.record), timeout_seconds, watch)
        if not is_hung:
            _wait_for_writer(tree, Path(plan.directory))
            term_seconds = _TERM_SECONDS
    finally:
        left = tree.end(term_seconds=term_seconds, kill_seconds=_KILL_SECONDS)
    if left:
        raise RunBusyError(
            f"{', '.join(left)}: expected to be ended by SIGKILL, alive after {_KILL_SECONDS:.0f} seconds",
            hint="it waits for a disk or a driver; look at the machine's log",
        )
    said = _said(output)
    return Ended(
        plan=plan,
        lines=_lines(Path(plan.record)),
        code=None if is_hung or tree.wait_status is None else os.waitstatus_to_exitcode(tree.wait_status),
        silent_seconds=timeout_seconds,
        output="\n".join(said[-_TAIL_LINES:]),
        not_kept=tuple(line.removeprefix(_NOT_KEPT) for line in said if line.startswith(_NOT_KEPT)),
        seconds=time.monotonic() - started,
    )


def surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the script: the user's, without what would lead to a run of the user's."""
    ours = (layout.RUN_DIR_VARIABLE, layout.ATTEMPT_VARIABLE, PLAN_VARIABLE)
    kept = {name: value for name, value in environment.items() if name not in ours}
    # Output that waits in a buffer is lost with its process; so is the stack of a crash in C code.
    return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **kept}


def judged(ended: Ended, *, steps: int | None = None) -> End:
    """Return how a process ended by its plan.

    "not-reached" means that it completed all `steps` (without it, as many as it has) and the moment of
    its kill never came. Raises UnplannedEndError if it ended otherwise.
    """
    kill = ended.plan.kill
    what = _what_is_wrong(ended, kill, steps)
    if what is not None:
        raise UnplannedEndError(what, ended.output)
    if kill is None:
        return "complete"
    return "killed" if _is_killed(ended) else "not-reached"


def _is_killed(ended: Ended) -> bool:
    return any(line.kind == "killed" for line in ended.lines)


def _what_is_wrong(ended: Ended, kill: Kill | None, steps: int | None) -> str | None:
    where = f"at step {ended.reached}"
    if ended.code is None:
        return f"hung {where}: no new step for {ended.silent_seconds:g} seconds"
    if kill is not None and _is_killed(ended):
        # What a script of its own kind makes of a request is its own affair; how it resumes is not.
        if ended.plan.observed is not None and kill.signal != "SIGKILL":
            return None
        # A run that obeys at its very last step completes, and that is right too.
        if ended.code in _OBEYED[kill.signal] or (ended.code == 0 and kill.signal != "SIGKILL"):
            return None
        return f"ended {where} with {_code(ended.code)} after {kill.signal}"
    if ended.code != 0:
        return f"ended {where} with {_code(ended.code)}"
    if steps is not None and ended.reached < steps:
        return f"ended {where} of {steps} as if it were complete"
    return None


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _wait(tree: ProcessTree, record: Path, timeout_seconds: float, watch: Callable[[int], None]) -> bool:
    """Wait until the leader ends; False if it has written no line for `timeout_seconds`."""
    size, steps, changed = 0, 0, time.monotonic()
    while not tree.collect() and not tree.leader_ended:
        new = _read_from(record, size)
        if new:
            size, changed = size + len(new), time.monotonic()
            steps += new.count(b'"kind":"step"')
            watch(steps)
        elif time.monotonic() > changed + timeout_seconds:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _wait_for_writer(tree: ProcessTree, directory: Path) -> None:
    until = time.monotonic() + _WRITE_SECONDS
    while not tree.collect() and has_orphaned_writer(directory) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""


def _lines(record: Path) -> tuple[Line, ...]:
    try:
        return tuple(read_record(record))
    except FileNotFoundError:
        return ()
    except msgspec.DecodeError as error:
        raise UnplannedEndError(f"left a record that cannot be read: {error}", "") from error


def _said(output: Path) -> list[str]:
    with suppress(FileNotFoundError), output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []
