"""Processes that hold a run and write its checkpoints, without a framework and without training."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from unbroken.checkpoint.store import CheckpointStore
from unbroken.handover.client import WriterProcess
from unbroken.handover.slots import Slot
from unbroken.rundir import layout
from unbroken.rundir.files import read_json
from unbroken.rundir.journal import read_events
from unbroken.training.attempt import Attempt

from .states import described, small_state

PATIENCE_SECONDS = 60.0


class Work:
    """What a trainer has at hand."""

    def __init__(self, directory: Path, attempt: Attempt, line: socket.socket) -> None:
        self.attempt = attempt
        self.writer = WriterProcess(directory, attempt.number)
        self.slots = [Slot(), Slot()]
        self.sequence = 0
        self.line = line
        self._line = line.makefile("rw")

    def fill(self, step: int, *, index: int = 0, state: dict[str, Any] | None = None) -> Slot:
        self.sequence += 1
        self.slots[index].fill(
            *described(step, state or small_state(step), attempt=self.attempt.number), self.sequence
        )
        self.writer.share(self.slots[index])
        return self.slots[index]

    def commit(self, step: int, *, index: int = 0) -> str:
        return self.writer.commit(self.fill(step, index=index)).name

    def writer_id(self) -> int:
        assert self.writer._child is not None
        return self.writer._child.process_id

    def say(self, what: Any) -> None:
        self._line.write(json.dumps(what) + "\n")
        self._line.flush()

    def hear(self) -> Any:
        return json.loads(self._line.readline())

    def close(self) -> None:
        self.writer.close()
        self.attempt.close()


class Trainer:
    """A forked process that holds a run, does `prepare` and then `work`, and ends."""

    def __init__(
        self,
        directory: Path,
        work: Callable[[Work], None],
        *,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.directory = directory
        self.process_id = os.fork()
        if self.process_id == 0:
            ours.close()
            _live(directory, prepare, work, theirs)
        theirs.close()
        ours.settimeout(PATIENCE_SECONDS)
        self._line = ours.makefile("rw")
        ours.close()

    def hear(self) -> Any:
        line = self._line.readline()
        assert line, "it ended without a word"
        return json.loads(line)

    def say(self, what: Any) -> None:
        self._line.write(json.dumps(what) + "\n")
        self._line.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process_id, number)

    def wait(self) -> int:
        """Return its exit code; minus the signal that ended it."""
        code = wait_for(self.process_id)
        self._line.close()
        return code


def wait_for(process_id: int) -> int:
    """Return the exit code of a child of ours, born or adopted."""
    descriptor = os.pidfd_open(process_id)
    try:
        assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0], "it does not end"
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _live(
    directory: Path, prepare: Callable[[], None], work: Callable[[Work], None], line: socket.socket
) -> NoReturn:
    code = 1
    try:
        faulthandler.disable()
        gc.collect()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        attempt = Attempt(directory)
        prepare()
        work(Work(directory, attempt, line))
        code = 0
    except BaseException:  # noqa: BLE001 - it must not return into the test
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def writer_of(directory: Path, attempt: int = 1) -> int:
    words = read_json(layout.attempt_directory(directory, attempt) / layout.WRITER_PROCESS)
    assert words is not None
    return int(words["process_id"])


def names(directory: Path) -> list[str]:
    return CheckpointStore(directory).names()


def saved(directory: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """The events of checkpoints that the writer process itself told of."""
    place = layout.attempt_directory(directory, attempt) / layout.events_file()
    return [event for event in read_events(place) if event["kind"] == "saved"]


def check_saved(directory: Path, step: int) -> None:
    """The checkpoint of `step` is there, and holds the small state of it."""
    checkpoint = CheckpointStore(directory).get(f"step-{step:08d}")
    assert checkpoint.verify().is_intact
    assert checkpoint.load() == small_state(step)


def ends(directory: Path, work: Callable[[Work], None], code: int = 0) -> None:
    """Let a trainer do `work`, and see how it ends."""
    assert Trainer(directory, work).wait() == code
