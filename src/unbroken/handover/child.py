"""One writer process, as the trainer sees it: started, spoken to on a socket, and waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from unbroken.errors import StorageError
from unbroken.handover.messages import MAX_MESSAGE_BYTES, Reply, Request, Start
from unbroken.handover.process import IGNORED_SIGNALS
from unbroken.handover.slots import Slot

# Not `-m` and PYTHONPATH: that puts the packages before the standard library, which some of them shadow.
# What this process could import in its order, that one can in the same.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from unbroken.handover.process import main; "
_PROGRAM += "sys.exit(main(sys.argv[1]))"
_PACKAGES = str(Path(__file__).parents[2])
_START_SECONDS = 300.0
_GONE = (BrokenPipeError, ConnectionResetError)


class NoProcessError(StorageError):
    """Here no writer process can be had, now or later."""


class Child:
    """A process of `unbroken.handover.process`. Raises OSError if it cannot be started."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _spawn(start, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        self._directory = start.directory
        self._channel = ours
        # It says so when it is ready, and until then it may be something that never answers.
        self._channel.settimeout(_START_SECONDS)
        self._is_ready = False
        self._slots: list[Slot] = []

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def index(self, slot: Slot) -> int:
        """Return the number under which the process knows `slot`, after making it known."""
        if slot not in self._slots:
            message = msgspec.json.encode(Request(do="slot"))
            with suppress(*_GONE):
                socket.send_fds(self._channel, [message], [slot.descriptor])
            self._slots.append(slot)
        return self._slots.index(slot)

    def send(self, request: Request) -> None:
        """Send `request`; nobody may be there to read it, which `receive` finds out."""
        with suppress(*_GONE):
            self._channel.send(msgspec.json.encode(request))

    def receive(self, number: int) -> Reply | None:
        """Return the answer to the request of that number, or None if the process has ended.

        Raises NoProcessError if it does not say that it is ready, for minutes.
        """
        while True:
            try:
                data = self._channel.recv(MAX_MESSAGE_BYTES)
            except _GONE:
                return None
            except TimeoutError:
                self._process.kill()
                raise self._never_ready(f"has said nothing for {_START_SECONDS:.0f} seconds") from None
            if not data:
                return None
            reply = msgspec.json.decode(data, type=Reply)
            self._is_ready = True
            self._channel.settimeout(None)
            # The one who waited for an earlier answer was interrupted.
            if reply.number == number:
                return reply

    def lost(self) -> StorageError:
        """Return the error that the process, which has ended, is gone.

        A NoProcessError if it was never ready: the next would fare no better, unless it was killed (for want
        of memory, which may pass).
        """
        code = self._process.wait()
        end = _end(code)
        if code != -signal.SIGKILL and not self._is_ready and not self._has_greeted():
            return self._never_ready(f"ended by {end}")
        return StorageError(
            f"{self._directory}: the process that writes checkpoints ended by {end}",
            hint="look for an out-of-memory kill in the kernel's log, or for a traceback in the output",
        )

    def close(self) -> int:
        """Let the process end, and return its exit code when it has."""
        self.send(Request(do="end"))
        self._channel.close()
        return self._process.wait()

    def _has_greeted(self) -> bool:
        with suppress(BlockingIOError, *_GONE):
            return self._channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT) != b""
        return False

    def _never_ready(self, what: str) -> NoProcessError:
        return NoProcessError(
            f"{self._directory}: the process that is to write checkpoints, {sys.executable}, {what}",
            hint="see the output for why; it has to be the Python that runs this script",
        )


def _spawn(start: Start, channel: int) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", _PROGRAM, msgspec.json.encode(start).decode()]
    # Blocked until it ignores them: it starts just when a run that was asked to end saves for the first time.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*program, *filter(os.path.isabs, map(str, (*sys.path, _PACKAGES)))],
            stdin=channel,
            # Where the script works may be removed or unmounted, or hold modules of the same names.
            cwd="/",
            stdout=subprocess.DEVNULL,
            # Where it was closed, the number may belong to another file by now.
            stderr=None if _is_open(2) else subprocess.DEVNULL,
            # What a terminal or a group of processes is told is not for it.
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_open(descriptor: int) -> bool:
    """Tell whether a child inherits `descriptor`, as no file does that Python opened."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _end(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
