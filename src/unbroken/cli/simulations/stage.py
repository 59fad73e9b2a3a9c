"""Where a failure is rehearsed: a directory of its own, the job under a real supervisor, a clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from unbroken.cli.simulations.story import Moment
from unbroken.errors import StorageError, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.heartbeat import Beat, read_heartbeat
from unbroken.rundir.processes import ProcessIdentity, is_alive
from unbroken.supervisor.states import ENDED, read_state

_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.02


class Stage:
    """Runs the job in `place`, by the command line that users have."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.job = place / "train.py"
        self.directory = place / "run"
        self.notes: list[Moment] = []
        # What the story is read from may be in there: it is closed last.
        self.resources = ExitStack()
        self._viewer: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *options: str,
        through: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the job under a supervisor; `through` is a command that runs the one that follows it."""
        run = ["run", "--run-dir", str(self.directory), "--backoff", "0.2", *options]
        command = [*through, *_unbroken(), *run, "--", sys.executable, str(self.job)]
        self._viewer = self._popen(command, environment or {})

    def call(self, *arguments: str) -> None:
        """Run another of our commands to its end. Raises UnbrokenError if it fails."""
        code = self._popen([*_unbroken(), *arguments], {}).wait(_PATIENCE_SECONDS)
        if code != 0:
            raise UnbrokenError(
                f"`unbroken {' '.join(arguments)}` ended with code {code}: {self._said()}",
                hint="this is no promise that was broken; the rehearsal itself went wrong",
            )

    def note(self, text: str, *details: str) -> None:
        """Add to the story what is done to the run now."""
        self.notes.append(Moment(time=time.time(), text=text, details=details))

    def beat(self) -> Beat | None:
        """Return the last heartbeat of the newest attempt."""
        newest = max(layout.attempts(self.directory), default=0)
        return read_heartbeat(layout.attempt_directory(self.directory, newest) / layout.HEARTBEAT)

    def supervisor_state(self) -> dict[str, Any]:
        """Return what the supervisor shows of itself; empty before the first time."""
        try:
            return read_json(self.directory / layout.SUPERVISOR_FILE) or {}
        except StorageError:
            return {}

    def until_step(self, step: int) -> None:
        """Return when the job has done `step`."""
        self.until(lambda: (beat := self.beat()) is not None and beat.step >= step, f"step {step}")

    def until_ended(self) -> None:
        """Return when the run is over, however it ended."""
        # Its command ends with it; the state alone may still be that of a run before.
        self.until(lambda: self._viewer is None or self._viewer.poll() is not None, "the end of the command")
        self.until(self._is_over, "the end of the run")

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Return when `is_so` holds. Raises UnbrokenError if that takes too long."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            if time.monotonic() > deadline or self._has_failed_to_start():
                raise UnbrokenError(
                    f"expected {what} within {_PATIENCE_SECONDS:.0f} seconds: {self._said()}",
                    hint="try again when this machine has less to do; `unbroken run` may say more",
                )
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """End what still runs, and release what is held."""
        with self.resources:
            if self.directory.exists() and not self._is_over():
                self._end_now()
            if self._viewer is not None and self._viewer.poll() is None:
                self._viewer.kill()
            if self._viewer is not None:
                self._viewer.wait(_PATIENCE_SECONDS)

    def _end_now(self) -> None:
        """End a run that did not come to its end, though its supervisor may be gone."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*_unbroken(), "stop", "--now", str(self.directory)],
                env=self._environment({}),
                capture_output=True,
                check=False,
                timeout=_PATIENCE_SECONDS,
            )
        leader = ProcessIdentity.from_json(self.supervisor_state().get("leader") or {})
        # Its number may be a stranger's by now.
        if leader is not None and is_alive(leader):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.process_id, signal.SIGKILL)

    def _is_over(self) -> bool:
        state = read_state(self.directory)
        return state is not None and state.state in ENDED

    def _has_failed_to_start(self) -> bool:
        return self._viewer is not None and self._viewer.poll() is not None and not self.supervisor_state()

    def _said(self) -> str:
        lines = (self.place / "said.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.place / "said.txt").open("ab") as said:
            return subprocess.Popen(
                command,
                cwd=self.place,
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        # A rehearsal inside a run is not of that run, and is not to be found among the user's.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("UNBROKEN_")}
        return {**kept, "XDG_STATE_HOME": str(self.place / "state"), **more}


def _unbroken() -> list[str]:
    # -P: what is in the current directory must not take the place of the library.
    return [sys.executable, "-P", "-m", "unbroken.cli.main"]
