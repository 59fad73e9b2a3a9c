"""The writer process: commits snapshots while the trainer trains, and the last one when it has died.

It is told by messages on a socket, its standard input, and watches the trainer's process itself: forked
data workers inherit the other end of the socket and would keep it open. Signals that ask a group of
processes to end are ignored: it ends by itself, as soon as nothing is left to write.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from unbroken.errors import StorageError, UnbrokenError
from unbroken.handover.committer import Committed, Committer
from unbroken.handover.messages import (
    MAX_MESSAGE_BYTES,
    Reply,
    Request,
    Start,
    committed_of,
    failure_of,
    reply_of,
)
from unbroken.handover.slots import SlotReader
from unbroken.rundir import layout
from unbroken.rundir.journal import Journal
from unbroken.rundir.latest import point_latest
from unbroken.rundir.processes import ProcessIdentity, read_stat
from unbroken.rundir.tell import tell

IGNORED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_NICENESS = 15
# ioprio_set(2): the number of the system call differs, and the C library has no function for it.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_LOWEST_BEST_EFFORT = (2 << 13) | 7
_LOOK_SECONDS = 1.0


def main(argument: str) -> int:
    """Serve the trainer that `argument`, a `Start` in JSON, describes; return the exit code."""
    _step_back()
    start = msgspec.json.decode(argument, type=Start)
    trainer = ProcessIdentity.from_json(dict(start.trainer))
    assert trainer is not None, "started without an identity"
    directory = Path(start.directory)
    committer = Committer(
        directory,
        start.attempt,
        trainer,
        parent=start.parent,
        sequence=start.sequence,
        look=start.look,
    )
    with socket.socket(fileno=0) as channel:
        service = _Service(channel, committer, trainer)
        if service.serve():
            return 0
    if service.unheard is not None:
        _announce(directory, start.attempt, service.unheard)
    return _save_what_is_left(directory, start.attempt, committer, service.slots)


class _Service:
    """Answers the trainer's messages until it ends, in order or not.

    `unheard` is the checkpoint, if any, that was written when there was nobody left to be told.
    """

    def __init__(self, channel: socket.socket, committer: Committer, trainer: ProcessIdentity) -> None:
        self.slots: list[SlotReader] = []
        self.unheard: Committed | None = None
        # Not by MSG_DONTWAIT: `socket.recv_fds` ignores the flags that it is given.
        channel.setblocking(False)
        self._channel = channel
        self._committer = committer
        self._trainer = trainer
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        with suppress(OSError, AttributeError):
            self._poll.register(os.pidfd_open(trainer.process_id), select.POLLIN)

    def serve(self) -> bool:
        """Return True when the trainer said that it ends, False when it is gone without a word."""
        self._send(Reply())
        while True:
            data, descriptors, _, _ = self._receive()
            if not data:
                return False
            request = msgspec.json.decode(data, type=Request)
            if request.do == "end":
                return True
            if request.do == "slot":
                self.slots.append(SlotReader(descriptors[0]))
                self.slots[-1].populate()
                continue
            reply = self._answer(request)
            # Sending alone does not tell: a forked data worker may hold the other end.
            is_heard = _is_alive(self._trainer) and self._send(reply)
            if reply.name and not is_heard:
                self.unheard = committed_of(reply)

    def _receive(self) -> tuple[bytes, list[int], int, object]:
        """Return the next message; an empty one when the trainer is gone and has left none."""
        while True:
            self._poll.poll(_LOOK_SECONDS * 1000)
            is_alive = _is_alive(self._trainer)
            # What it sent before it died comes first.
            with suppress(BlockingIOError, ConnectionResetError):
                return socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 1)
            if not is_alive:
                return b"", [], 0, None

    def _send(self, reply: Reply) -> bool:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(msgspec.json.encode(reply))
            return True
        return False

    def _answer(self, request: Request) -> Reply:
        try:
            if request.do == "verify":
                return Reply(number=request.number, is_intact=self._committer.is_intact(request.name))
            if request.do == "read-back":
                damage = self._committer.damage(request.name, sampled=request.sampled)
                return Reply(number=request.number, damage=damage)
            return reply_of(self._committer.commit(self.slots[request.slot]), request.number)
        except UnbrokenError as error:
            return Reply(number=request.number, failure=failure_of(error))


def _save_what_is_left(directory: Path, attempt: int, committer: Committer, slots: list[SlotReader]) -> int:
    left = committer.newest_left(slots)
    if left is None:
        return 0
    try:
        committed = committer.commit(left)
    except UnbrokenError as error:
        tell(f"the last snapshot of the process that ended could not be saved: {error.message}")
        return error.exit_code
    _announce(directory, attempt, committed)
    return 0


def _announce(directory: Path, attempt: int, committed: Committed) -> None:
    """Do what the trainer does when a checkpoint is written."""
    if committed.is_good:
        point_latest(directory, committed.name)
    # What counts is written; a full disk has no room for the words.
    with (
        suppress(StorageError),
        Journal(layout.attempt_directory(directory, attempt) / layout.events_file()) as journal,
    ):
        journal.append("saved", step=committed.step, checkpoint=committed.name, after_end=True)
        if committed.not_finite:
            journal.append(
                "not-finite", checkpoint=committed.name, found=committed.not_finite, after_end=True
            )
        if committed.invalid:
            journal.append("not-valid", checkpoint=committed.name, found=committed.invalid, after_end=True)
        journal.sync()
    tell(f"the training process ended; its last snapshot is saved in {committed.name}")
    if committed.not_finite:
        tell(f"{committed.name} holds {committed.not_finite}: it is kept as evidence, and never resumed from")
    if committed.invalid:
        tell(f"{committed.name} failed its validation ({committed.invalid}): it is never resumed from")


def _is_alive(trainer: ProcessIdentity) -> bool:
    if read_stat(os.getpid()) is None:
        # There is no /proc here. The trainer is our parent, and an orphan gets another.
        return os.getppid() == trainer.process_id
    found = read_stat(trainer.process_id)
    # Not by the name of the host, which may change while both live.
    return found is not None and found.state not in "ZX" and found.start_ticks == trainer.start_ticks


def _step_back() -> None:
    """Leave the processor and the disk to training, and ending to ourselves."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    # Read when NumPy is imported: no threads that nothing here has work for.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        # Refused in some containers; then the disk is shared evenly.
        ctypes.CDLL(None).syscall(call, 1, 0, _IOPRIO_LOWEST_BEST_EFFORT)
