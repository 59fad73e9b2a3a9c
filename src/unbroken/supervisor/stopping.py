"""Requests to stop a run, by signal or by file, and how long it may take to obey."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir.control import StopRequest, clear_stop, merged, read_stop, request_stop
from unbroken.supervisor.records import say

# All that the supervisor is told comes by these. They stay blocked and are taken one by one in
# `wait`: no handler ever interrupts it in the middle of something. A thread started later inherits that.
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Whoever writes the stop file sends this one after it, to have it looked at at once.
_WAKING = signal.SIGINT
# Nobody but a batch system that is about to take the machine sends this one.
_ALWAYS_PREEMPTION = signal.SIGUSR1
_NEAR_END_SECONDS = 10.0
_NEAR_END_SHARE = 0.1
# Looked at twice a second, less would pass between two looks.
_LEAST_NEAR_END_SECONDS = 1.0


def block_signals() -> None:
    """From now on let signals wait for `StopWatch.wait`, and ignore a closing terminal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Ignored, as some parents leave it, the kernel would forget how children ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def reason_of(number: int, sender: int, engine: str) -> tuple[str, bool]:
    """Return why a signal asks for a stop, in words, and whether it is a preemption.

    `engine` is what runs us and owns the machine, empty if nothing does: it says by SIGTERM that the
    machine is needed for something else, where a person would mean the run.

    >>> reason_of(15, 7, ""), reason_of(15, 7, "Slurm")
    (('SIGTERM from process 7', False), ('preemption: Slurm: SIGTERM from process 7', True))
    """
    said = f"{signal.Signals(number).name} from process {sender}"
    is_preemption = number == _ALWAYS_PREEMPTION or (bool(engine) and number == signal.SIGTERM)
    if not is_preemption:
        return said, False
    return ": ".join(part for part in ("preemption", engine, said) if part), True


class StopWatch:
    """Watches for a request to stop the run in `directory`.

    SIGTERM, SIGINT and SIGUSR1 are such a request with `grace_seconds`; the file control/stop.json is one
    with its own deadline. Each further one may leave less time, never more. `engine` is as in `reason_of`.
    """

    def __init__(self, directory: Path, *, grace_seconds: float, engine: str = "") -> None:
        self._directory = directory
        self._engine = engine
        self.grace_seconds = grace_seconds
        self._ends_at = 0.0
        self._near_end_at = 0.0
        self.request: StopRequest | None = None
        self._unwritten: StopRequest | None = None

    def wait(self, seconds: float) -> bool:
        """Return after `seconds`, or earlier for a signal; True if there is a new request."""
        information = signal.sigtimedwait(_SIGNALS, max(0.0, seconds))
        if information is not None and self._is_news(information.si_signo):
            reason, is_preemption = reason_of(information.si_signo, information.si_pid, self._engine)
            self.ask(reason, is_preemption=is_preemption)
        return self._take_note()

    def _is_news(self, number: int) -> bool:
        return number in _ASKING and (number != _WAKING or read_stop(self._directory) is None)

    def ask(self, reason: str, seconds: float | None = None, *, is_preemption: bool = False) -> None:
        """Make a request of our own, to be met within `seconds`, else within the grace.

        It takes effect at the next `wait`; what is asked already counts along, as `merged` says.
        """
        deadline = time.time() + (self.grace_seconds if seconds is None else seconds)
        try:
            request_stop(
                self._directory, reason=reason, deadline_seconds=deadline, is_preemption=is_preemption
            )
        except StorageError as error:
            # The signal to the leader still asks; only ranks that watch the file do not see it.
            say(f"could not {error.message}")
            request = StopRequest(reason=reason, deadline_seconds=deadline, is_preemption=is_preemption)
            self._unwritten = merged(self._unwritten, request)

    def _take_note(self) -> bool:
        request = read_stop(self._directory)
        if self._unwritten is not None:
            request = merged(request, self._unwritten)
        if request is None or request == self.request:
            return False
        self.request = request
        # The deadline is wall-clock time, for other machines; counted down it is not, clocks jump.
        left = self.grace_seconds
        if request.deadline_seconds is not None:
            left = request.deadline_seconds - time.time()
        self._ends_at = time.monotonic() + left
        share = max(_LEAST_NEAR_END_SECONDS, _NEAR_END_SHARE * left)
        self._near_end_at = self._ends_at - min(_NEAR_END_SECONDS, share, left / 2)
        return True

    @property
    def is_asked(self) -> bool:
        return self.request is not None

    @property
    def is_written(self) -> bool:
        """False if the request is known to us alone, for want of space on the disk."""
        return self._unwritten is None

    @property
    def is_near_end(self) -> bool:
        """True in the last tenth of the time to stop in order, from one to ten seconds, or half of it."""
        return self.request is not None and time.monotonic() >= self._near_end_at

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
