"""Requests to stop a run, by signal or by file, and how long it may take to obey."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir.control import StopRequest, clear_stop, read_stop, request_stop
from unbroken.supervisor.records import say

# All that the supervisor is told comes by these. They stay blocked and are taken one by one in
# `wait`: no handler ever interrupts it in the middle of something.
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_ASKING = (signal.SIGTERM, signal.SIGINT)


def block_signals() -> None:
    """From now on let signals wait for `StopWatch.wait`, and ignore a closing terminal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Ignored, as some parents leave it, the kernel would forget how children ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class StopWatch:
    """Watches for a request to stop the run in `directory`.

    SIGTERM and SIGINT are such a request with `grace_seconds`; the file control/stop.json is one with
    its own deadline, and may be replaced by one that leaves less time.
    """

    def __init__(self, directory: Path, *, grace_seconds: float) -> None:
        self._directory = directory
        self._grace_seconds = grace_seconds
        self._ends_at = 0.0
        self.request: StopRequest | None = None
        self._unwritten: StopRequest | None = None

    def wait(self, seconds: float) -> bool:
        """Return after `seconds`, or earlier for a signal; True if there is a new request."""
        information = signal.sigtimedwait(_SIGNALS, max(0.0, seconds))
        asked = information is not None and information.si_signo in _ASKING
        if asked and information is not None and read_stop(self._directory) is None:
            self.ask(f"{signal.Signals(information.si_signo).name} from process {information.si_pid}")
        return self._take_note()

    def ask(self, reason: str, seconds: float | None = None) -> None:
        """Make a request of our own, to be met within `seconds`, else within the grace.

        It takes effect at the next `wait`. One that is there already and leaves less time stays.
        """
        deadline = time.time() + (self._grace_seconds if seconds is None else seconds)
        there = read_stop(self._directory)
        if there is not None and (there.deadline_seconds or deadline) <= deadline:
            return
        try:
            request_stop(self._directory, reason=reason, deadline_seconds=deadline)
        except StorageError as error:
            # The signal to the leader still asks; only ranks that watch the file do not see it.
            say(f"could not {error.message}")
            self._unwritten = StopRequest(reason=reason, deadline_seconds=deadline)

    def _take_note(self) -> bool:
        request = read_stop(self._directory) or self._unwritten
        if request is None or request == self.request:
            return False
        self.request = request
        # The deadline is wall-clock time, for other machines; counted down it is not, clocks jump.
        if request.deadline_seconds is not None:
            self._ends_at = time.monotonic() + request.deadline_seconds - time.time()
        else:
            self._ends_at = time.monotonic() + self._grace_seconds
        return True

    @property
    def is_asked(self) -> bool:
        return self.request is not None

    @property
    def is_overdue(self) -> bool:
        """True when the time to stop in order is over."""
        return self.request is not None and time.monotonic() >= self._ends_at

    def clear(self) -> None:
        """Withdraw the request: it is obeyed, or of an earlier time."""
        try:
            clear_stop(self._directory)
        except OSError as error:
            say(f"could not remove the stop request: {error}")
