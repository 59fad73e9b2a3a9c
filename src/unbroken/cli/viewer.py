"""The foreground of `unbroken run`: shows a run that a supervisor keeps going, and takes Ctrl-C.

A viewer is no parent of the run: when it ends, by a closed terminal or a closed pipe, the run goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, TextIO

from unbroken.cli import output, outside
from unbroken.cli.follow import OutputFollower, Piece
from unbroken.cli.stop import ask_to_stop
from unbroken.errors import StorageError, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.rundir.processes import identify
from unbroken.supervisor.host.engines import engine_of, reap_strangers

_LOOK_SECONDS = 0.1
# A terminal may take less than a script prints: what is to be said must not wait for all of that.
_PIECES_AT_ONCE = 4
# What systemd sets, to its number, for the process that it starts.
_UNIT_PROCESS_VARIABLE = "SYSTEMD_EXEC_PID"


class RunView:
    """What is new of the run in `directory`, output and events: from now on, and attempt `first`.

    The output of that attempt is shown from the byte `start`.
    """

    def __init__(self, directory: Path, first: int, *, start: int = 0) -> None:
        self._directory = directory
        self._output = OutputFollower(directory, first, start=start)
        self._pieces: Iterator[Piece] | None = None
        self._events: list[dict[str, Any]] = []
        self._journal_bytes = 0
        self._events_seen = 0
        self._events_seen = len(self._new_events())

    def show_new(self) -> bool:
        """Show what came since the last call: output as it was written, events in words on stderr.

        Returns True when that is all for now, False if there was so much that the next call goes on with it.
        """
        if self._pieces is None:
            # Events first: an attempt that is said to have ended writes no more.
            self._events = self._new_events()
            self._pieces = self._output.new()
        pieces = list(islice(self._pieces, _PIECES_AT_ONCE))
        for piece in pieces:
            if piece.freed_bytes:
                say(f"unbroken: ... {output.size(piece.freed_bytes)} of older output freed")
            sys.stdout.buffer.write(piece.data)
        sys.stdout.flush()
        if len(pieces) == _PIECES_AT_ONCE:
            return False
        self._pieces = None
        for text in filter(None, map(notice, self._events)):
            say(f"unbroken: {text}")
        return True

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
        self._view: RunView | None = RunView(directory, max(layout.attempts(directory), default=0) + 1)
        # A handler may put into it at any moment, whatever it interrupts.
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._to_say: SimpleQueue[str] = SimpleQueue()
        # An interrupt that was ignored from the start, as for a shell's background job, stays ignored.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)

    def show(self, supervisor: subprocess.Popen[bytes]) -> int:
        """Show output and events until the run is over, and return its exit code."""
        # Not by the one that shows: the terminal, or the pipe, may let it wait for ever.
        threading.Thread(target=self._pass_on, args=(supervisor,), daemon=True).start()
        code, is_all = None, True
        while True:
            if is_all:
                # Looked at before reading, so that what was written last is not missed.
                code = supervisor.poll()
            reap_strangers(supervisor.pid)
            is_all = self._show_new()
            while not self._to_say.empty():
                say(self._to_say.get())
            if is_all and code is not None:
                return self._ended(code)
            if is_all:
                time.sleep(_LOOK_SECONDS)

    def _show_new(self) -> bool:
        if self._view is None:
            return True
        try:
            return self._view.show_new()
        except (OSError, StorageError) as error:
            is_unread = isinstance(error, BrokenPipeError)
            why = (
                "nobody reads the output any more"
                if is_unread
                else f"the output is not shown any more: {error}"
            )
            say(f"unbroken: {why}; the run goes on: {self._directory}")
            if is_unread and not _is_the_job():
                raise
            self._view = None
            _discard(sys.stdout)
            return True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.put(number)

    def _pass_on(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Pass on each signal that comes; only a person at the keyboard asks twice for more."""
        is_asked = is_killed = False
        while True:
            number = self._signals.get()
            if is_killed:
                continue
            is_killed = is_asked and number == signal.SIGINT
            if is_killed:
                self._to_say.put("unbroken: killing it")
                self._ask(supervisor, "killed from the terminal", 0.0)
                continue
            if not is_asked:
                self._to_say.put(self._until_when())
            is_asked = True
            if number == signal.SIGINT:
                self._ask(supervisor, "stopped from the terminal", self._grace_seconds)
            else:
                # It knows better what the sender means by it, also by one after a Ctrl-C.
                supervisor.send_signal(number)

    def _ask(self, supervisor: subprocess.Popen[bytes], reason: str, seconds: float) -> None:
        identity = identify(supervisor.pid)
        if identity is None:
            return
        try:
            ask_to_stop(self._directory, identity, reason=reason, seconds=seconds)
        except StorageError as error:
            self._to_say.put(f"unbroken: the request could not be written: {error.message}")

    def _until_when(self) -> str:
        seconds = self._grace_seconds
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        return f"unbroken: saving, up to {output.duration(seconds)}, until {until}; Ctrl-C again to kill"

    def _ended(self, code: int) -> int:
        if code >= 0:
            return code
        raise UnbrokenError(
            f"the supervisor was ended by {signal.Signals(-code).name}; its attempt may still run",
            hint=f"`unbroken revive {self._directory}` takes the run over",
        )


def say(text: str) -> None:
    """Say something on stderr, if that takes it: a run is worth more than what is said about it."""
    try:
        output.note(text)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Let what is still to be written to `stream` go nowhere, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _is_the_job() -> bool:
    """Tell whether whatever started this command ends the whole run when the command ends."""
    own = os.getpid()
    is_first = own == 1 or os.environ.get(_UNIT_PROCESS_VARIABLE) == str(own)
    return is_first or engine_of(os.environ) is not None


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
            if event.get("action") == "roll-back":
                return f"{event['reason']}; going on in {pause}{_hint(event)}"
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
        # What training says is in its output, too.
        case "alarm" if event.get("source") != "training":
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
