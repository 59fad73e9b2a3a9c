"""The foreground of `unbroken run`: shows a run that a supervisor keeps going, and takes Ctrl-C.

A viewer is no parent of the run: when it ends, by a closed terminal or a closed pipe, the run goes on.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from unbroken.cli import output
from unbroken.cli.follow import OutputFollower
from unbroken.cli.stop import ask_to_stop
from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify

_LOOK_SECONDS = 0.1
_SAVE_AND_STOP = 1
_KILL = 2


class Viewer:
    """Shows the run in `directory` from the attempt after those that are there now.

    Made before its supervisor starts, so that neither output nor a Ctrl-C is missed.
    """

    def __init__(self, directory: Path, *, grace_seconds: float) -> None:
        self._directory = directory
        self._grace_seconds = grace_seconds
        self._output = OutputFollower(directory, max(layout.attempts(directory), default=0) + 1)
        self._journal_bytes = 0
        self._events_seen = 0
        self._events_seen = len(self._new_events())
        # What was wanted of the run, raised by signals, and what of it was passed on.
        self._wanted = 0
        self._passed_on = 0
        # An interrupt that was ignored from the start, as for a shell's background job, stays ignored.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, self._on_terminate)

    def show(self, supervisor: subprocess.Popen[bytes]) -> int:
        """Show output and events until the run is over, and return its exit code."""
        try:
            while True:
                # Looked at before reading, so that what was written last is not missed.
                code = supervisor.poll()
                self._show_new()
                if code is not None:
                    return self._ended(code)
                self._pass_on(supervisor.pid)
                time.sleep(_LOOK_SECONDS)
        except BrokenPipeError:
            output.note(f"unbroken: nobody reads the output any more; the run goes on: {self._directory}")
            raise

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        self._wanted = min(_KILL, self._wanted + 1)

    def _on_terminate(self, _: int, __: FrameType | None) -> None:
        # Engines repeat it; only a person at the keyboard asks twice for more.
        self._wanted = max(_SAVE_AND_STOP, self._wanted)

    def _pass_on(self, process_id: int) -> None:
        supervisor = identify(process_id)
        if self._wanted == self._passed_on or supervisor is None:
            return
        self._passed_on = self._wanted
        if self._wanted == _KILL:
            output.note("unbroken: killing it")
            ask_to_stop(self._directory, supervisor, reason="killed from the terminal", seconds=0.0)
            return
        seconds = self._grace_seconds
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        output.note(
            f"unbroken: saving, up to {output.duration(seconds)}, until {until}; Ctrl-C again to kill"
        )
        ask_to_stop(self._directory, supervisor, reason="stopped from the terminal", seconds=seconds)

    def _show_new(self) -> None:
        # Events first: an attempt that is said to have ended writes no more.
        events = self._new_events()
        for _, piece in self._output.new():
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        for event in events:
            text = notice(event)
            if text is not None:
                output.note(f"unbroken: {text}")

    def _new_events(self) -> list[dict[str, Any]]:
        path = self._directory / layout.JOURNAL_FILE
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return []
        if size == self._journal_bytes:
            return []
        self._journal_bytes = size
        events = list(read_events(path))[self._events_seen :]
        self._events_seen += len(events)
        return events

    def _ended(self, code: int) -> int:
        if code >= 0:
            return code
        raise UnbrokenError(
            f"the supervisor was ended by {signal.Signals(-code).name}; its attempt may still run",
            hint=f"`unbroken status {self._directory}` shows what is left",
        )


def notice(event: dict[str, Any]) -> str | None:
    """Return an event of the journal in words for people, or None if it is not worth any."""
    match event["kind"]:
        case "attempt-started":
            return f"attempt {event['attempt']} started, process {event['process_id']}"
        case "attempt-ended":
            lived = output.duration(event["lived_seconds"])
            why = "; ".join(event["evidence"])
            return f"attempt {event['attempt']} ended after {lived}: {event['outcome']}: {why}"
        case "decision":
            pause = output.duration(event["next_start"] - event["time"])
            return f"restarting in {pause}: {event['reason']}{_hint(event)}"
        case "run-ended":
            general = "; when it is mended, start it again" if event["state"] == "held" else ""
            return f"{event['state']}: {event['reason']}{_hint(event) or general}"
        case _:
            return None


def _hint(event: dict[str, Any]) -> str:
    return f" (hint: {event['hint']})" if event["hint"] else ""
