"""Requests from outside: signals and files. They set a flag; the step boundary acts on it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from unbroken.errors import EXIT_RUN_ME_AGAIN
from unbroken.rundir import layout
from unbroken.rundir.control import read_stop, take_save_request
from unbroken.rundir.tell import tell
from unbroken.training.memory_guard import MemoryGuard

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(SystemExit):
    """The state is saved and the process may end; leaves with exit code 75, "run me again"."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_RUN_ME_AGAIN)
        self.reason = reason


class Requests:
    """Knows whether this run was asked to stop, or to save.

    Signals can only be taken over in the main thread; elsewhere the stop file alone is watched. `guard`
    asks for itself.
    """

    def __init__(self, directory: Path, guard: MemoryGuard | None = None) -> None:
        self._directory = directory
        self._guard = guard
        # Strings, and one system call each: both are looked for at every step.
        self._stop_file = str(directory / layout.STOP_FILE)
        self._save_file = str(directory / layout.SAVE_NOW_FILE)
        self._signal: int | None = None
        self._previous: dict[int, object] = {}
        self._is_installed = False
        self._asked = 0
        self._is_taken_told = False
        self._process_id = os.getpid()

    def install(self) -> bool:
        """Take over SIGTERM and SIGINT until `remove`; False if this thread cannot.

        Handlers that were there before are called, too.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        self._process_id = os.getpid()
        self._is_installed = True
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return True

    def remove(self) -> None:
        """Give the signals back to whoever had them, but for those that the script has taken since."""
        for number, handler in self._previous.items():
            if self._has(number):
                # One that Python does not know, set in C, cannot be had back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous.clear()
        self._is_installed = False
        if self._guard is not None:
            self._guard.close()

    def stop_reason(self) -> str | None:
        """Return why the run should stop, or None."""
        self._tell_if_taken()
        if self._signal is not None:
            return f"signal {signal.Signals(self._signal).name}"
        if os.path.exists(self._stop_file):
            request = read_stop(self._directory)
            return request.reason if request is not None else None
        return self._guard.stop_reason() if self._guard is not None else None

    def take_save(self) -> bool:
        """Tell whether a checkpoint was asked for since the last call."""
        if self._guard is not None and self._guard.take_save():
            return True
        return os.path.exists(self._save_file) and take_save_request(self._directory)

    def _tell_if_taken(self) -> None:
        self._asked += 1
        # Now and then: what looks takes longer than all else that is done at a step.
        if self._is_taken_told or not self._is_installed or self._asked & (self._asked - 1):
            return
        if not self._has(signal.SIGTERM):
            self._is_taken_told = True
            tell(
                "the script has set a handler of its own for SIGTERM: unless that calls the one before it, "
                "the signal does not stop this run; one that was set before the run began is called, too"
            )

    def _has(self, number: int) -> bool:
        handler = signal.getsignal(number)
        # The one for a second Ctrl-C is ours, too.
        return handler == self._on_signal or (
            number == signal.SIGINT and handler is signal.default_int_handler
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process_id or not self._is_installed:
            # In a forked child, which inherits this handler, and when the run is over, should another handler
            # call it, there is no step that would ever obey it.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signal = number
        if number == signal.SIGINT:
            # The second Ctrl-C means it: interrupt at once, without a save.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _say(
                b"unbroken: saving at the end of this step, then stopping; Ctrl-C again interrupts at once\n"
            )
        earlier = self._previous.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            # It may want to end the process: so do we, once the state is saved.
            with suppress(SystemExit, KeyboardInterrupt):
                earlier(number, frame)


def _say(words: bytes) -> None:
    # Not print: a handler may run in the middle of one. A terminal that is gone needs no answer.
    with suppress(OSError):
        os.write(2, words)
