"""The foreground of `unbroken run`: shows a run that a supervisor keeps going, and takes Ctrl-C.

A viewer is no parent of the run: when it ends, by a closed terminal or a closed pipe, the run goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from unbroken.cli import output, outside
from unbroken.cli.follow import OutputFollower
from unbroken.cli.stop import ask_to_stop
from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify
from unbroken.supervisor.engines import reap_strangers

_LOOK_SECONDS = 0.1
_SAVE_AND_STOP = 1
_KILL = 2


class RunView:
    """What is new of the run in `directory`, output and events: from now on, and attempt `first`.

    The output of that attempt is shown from the byte `start`.
    """

    def __init__(self, directory: Path, first: int, *, start: int = 0) -> None:
        self._directory = directory
        self._output = OutputFollower(directory, first, start=start)
        self._journal_bytes = 0
        self._events_seen = 0
        self._events_seen = len(self._new_events())

    def show_new(self) -> None:
        """Show what came since the last call: output as it was written, events in words on stderr."""
        # Events first: an attempt that is said to have ended writes no more.
        events = self._new_events()
        for piece in self._output.new():
            if piece.freed_bytes:
                output.note(f"unbroken: ... {output.size(piece.freed_bytes)} of older output freed")
            sys.stdout.buffer.write(piece.data)
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


class Viewer:
    """Shows the run in `directory` from the attempt after those that are there now.

    Made before its supervisor starts, so that neither output nor a Ctrl-C is missed.
    """

    def __init__(self, directory: Path, *, grace_seconds: float) -> None:
        self._directory = directory
        self._grace_seconds = grace_seconds
        self._view = RunView(directory, max(layout.attempts(directory), default=0) + 1)
        # What was wanted of the run, raised by signals, and what of it was passed on.
        self._wanted = 0
        self._passed_on = 0
        self._signal: int | None = None
        # An interrupt that was ignored from the start, as for a shell's background job, stays ignored.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_terminate)

    def show(self, supervisor: subprocess.Popen[bytes]) -> int:
        """Show output and events until the run is over, and return its exit code."""
        try:
            while True:
                # Looked at before reading, so that what was written last is not missed.
                code = supervisor.poll()
                reap_strangers(supervisor.pid)
                self._view.show_new()
                if code is not None:
                    return self._ended(code)
                self._pass_on(supervisor.pid)
                time.sleep(_LOOK_SECONDS)
        except BrokenPipeError:
            output.note(f"unbroken: nobody reads the output any more; the run goes on: {self._directory}")
            raise

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        self._wanted = min(_KILL, self._wanted + 1)

    def _on_terminate(self, number: int, _: FrameType | None) -> None:
        # Engines repeat it; only a person at the keyboard asks twice for more.
        self._wanted = max(_SAVE_AND_STOP, self._wanted)
        self._signal = number

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
        if self._signal is not None:
            # It knows better what the sender means by it.
            os.kill(process_id, self._signal)
            return
        ask_to_stop(self._directory, supervisor, reason="stopped from the terminal", seconds=seconds)

    def _ended(self, code: int) -> int:
        if code >= 0:
            return code
        raise UnbrokenError(
            f"the supervisor was ended by {signal.Signals(-code).name}; its attempt may still run",
            hint=f"`unbroken revive {self._directory}` takes the run over",
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
        case "run-revived":
            return f"a new supervisor took over: {event['found']}"
        case _:
            return _beside(event) or outside.words(event)


def _beside(event: dict[str, Any]) -> str | None:
    match event["kind"]:
        case "alarm":
            return f"{event['text']}{_hint(event)}"
        case "output-freed":
            return f"{output.size(event['freed_bytes'])} of older output freed"
        case "side-process-lost":
            return "the process that sends notifications and compresses outputs was killed"
        case "saves-missed":
            return f"no checkpoint: {event['reason']}"
        case "notification-failed":
            return f"notification {event['notification']} did not reach {event['target']}: {event['reason']}"
        case _:
            return None


def _hint(event: dict[str, Any]) -> str:
    return f" (hint: {event['hint']})" if event["hint"] else ""
