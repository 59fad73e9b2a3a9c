"""The processes of the demo: the undisturbed run, the supervised run, and the proof that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify
from unbroken.supervisor.states import Snapshot, read_state

# Everything that the demo starts, at any depth, inherits this variable, and is found by it in the end.
MARK = "UNBROKEN_DEMO"
_KILL_SECONDS = 10.0
_ASKING_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_LINES = 15


class DemoError(Exception):
    """The demo cannot go on, or saw something other than what was promised."""


class Deadline:
    """The hard end of one phase, whose name the failure carries."""

    def __init__(self, phase: str, seconds: float) -> None:
        self._phase, self._seconds = phase, seconds
        self._ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def failure(self) -> DemoError:
        return DemoError(f"{self._phase}: not over after {self._seconds:.0f} s")

    def wait(self, is_there: Callable[[], bool], *, look_seconds: float = 0.01) -> None:
        """Return as soon as `is_there()`; raise when the time of the phase is over."""
        while not is_there():
            if not self.seconds_left:
                raise self.failure()
            time.sleep(look_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """How to start the example, and in which environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def run_plainly(self, directory: Path, deadline: Deadline) -> None:
        """Train from beginning to end, without a supervisor and without a disturbance."""
        log = directory.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.command, "--run-dir", str(directory)],
                env=dict(self.environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(deadline.seconds_left)
        except subprocess.TimeoutExpired:
            raise deadline.failure() from None
        if code:
            raise DemoError(f"the undisturbed run ended with exit code {code}:\n{_tail(log)}")


class SupervisedRun:
    """The example under the real `unbroken run`, detached, in the run directory `directory`."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.directory = directory
        self._trainer = trainer

    def start(self, deadline: Deadline) -> None:
        """`unbroken run`; returns when the new attempt has restored its state, or begun."""
        before = self.newest_attempt
        options = ("--detach", "--backoff", "0.2", "--run-dir", str(self.directory))
        self.unbroken("run", *options, "--", *self._trainer.command, deadline=deadline)
        self.wait_for_attempt(before + 1, deadline)

    def unbroken(self, *arguments: str, deadline: Deadline) -> str:
        """Run one command of the real command line and return its output."""
        command = [sys.executable, "-m", "unbroken.cli.main", *arguments]
        try:
            done = subprocess.run(
                command,
                env=dict(self._trainer.environment),
                capture_output=True,
                text=True,
                timeout=deadline.seconds_left,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise deadline.failure() from None
        if done.returncode:
            words = f"{done.stdout}{done.stderr}".strip()
            raise DemoError(f"unbroken {arguments[0]}: exit code {done.returncode}: {words}")
        return done.stdout

    @property
    def newest_attempt(self) -> int:
        return max(layout.attempts(self.directory), default=0)

    @property
    def state(self) -> Snapshot:
        found = read_state(self.directory)
        assert found is not None, "asked before it was started"
        return found

    def beat(self) -> Beat | None:
        """Return the last heartbeat of the newest attempt."""
        attempt = layout.attempt_directory(self.directory, self.newest_attempt)
        return read_heartbeat(attempt / layout.HEARTBEAT)

    def wait_for_attempt(self, number: int, deadline: Deadline) -> None:
        """Return when the attempt `number` trains; raise if the run ends before."""
        events = layout.attempt_directory(self.directory, number) / layout.events_file()

        def trains() -> bool:
            if any(event["kind"] == "began" for event in read_events(events)):
                return True
            self.check_live()
            return False

        deadline.wait(trains)

    def wait_for_step(self, step: int, deadline: Deadline) -> int:
        """Return the process id of the trainer as soon as it has done `step` steps."""
        found: list[int] = []

        def is_there() -> bool:
            beat = self.beat()
            if beat is not None and beat.step >= step and beat.phase in ("training", "saving"):
                found.append(beat.process_id)
                return True
            self.check_live()
            return False

        # Less than one step of training: nothing is to happen between seeing and acting.
        deadline.wait(is_there, look_seconds=0.0005)
        return found[0]

    def check_live(self) -> None:
        """Raise if the run has ended, which it must not while the demo has plans with it."""
        state = self.state
        if not state.is_live:
            log = layout.attempt_directory(self.directory, self.newest_attempt) / layout.OUTPUT_LOG
            raise DemoError(f"the run ended too early: {state.state}: {state.reason}\n{_tail(log)}")


@contextmanager
def nothing_left_running(mark: str) -> Iterator[None]:
    """End every process that bears `mark` when the block is left, however it is left."""
    strangers = marked_processes(mark)
    if strangers:
        raise DemoError(f"another demo writes there: process {strangers[0]}; choose another --output")
    try:
        yield
    finally:
        # An impatient second Ctrl-C must not leave processes behind; this takes moments.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ASKING_TO_END}
        try:
            deadline = Deadline("ending what the demo started", _KILL_SECONDS)
            # Again and again: until the supervisor itself is gone, it may start one more attempt.
            deadline.wait(lambda: not _kill_all(marked_processes(mark)))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def marked_processes(mark: str) -> list[int]:
    """Return the ids of all living processes, but this one, that bear `mark`."""
    wanted = os.fsencode(f"{MARK}={mark}")
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            # Gone meanwhile, or of another user and so not ours.
            with suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return sorted(number for number in found if identify(number) is not None)


def _kill_all(numbers: Sequence[int]) -> Sequence[int]:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return numbers


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])
