"""How an attempt is asked to stop: by the stop file, which every rank sees, and by SIGTERM to its leader.

Launchers pass SIGTERM on to their ranks and kill these after a time of their own, torchrun after 30
seconds; shells just die of it. Where such a process leads, and the training below it watches the stop
file, the signal waits until the training has said its last words, or until the time is nearly over.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.last_words import LastWords, read_last_words
from unbroken.rundir.processes import ProcessStat
from unbroken.supervisor.stopping import StopWatch


class Tree(Protocol):
    """What is asked: the processes of one attempt."""

    leader: int

    @property
    def leader_ended(self) -> bool: ...

    def ask(self) -> None: ...

    def members(self) -> list[ProcessStat]: ...


class Asking:
    """Asks the attempt in `directory`, whose processes are `tree`."""

    def __init__(self, tree: Tree, directory: Path) -> None:
        self._tree = tree
        self._directory = directory
        self._is_reminded = False

    def ask(self, stop: StopWatch) -> None:
        """Ask as the time of `stop` goes by; called at every look, it sends each signal once."""
        if not self._tree.leader_ended and not stop.is_near_end and self._is_file_enough(stop):
            return
        self._tree.ask()
        if stop.is_near_end and not self._is_reminded:
            self._is_reminded = True
            self._remind()

    def _is_file_enough(self, stop: StopWatch) -> bool:
        # What could not be written for want of space nobody has seen.
        if not stop.is_written:
            return False
        beat = read_heartbeat(self._directory / layout.HEARTBEAT)
        trainer = beat.process_id if beat is not None else None
        return is_file_enough(read_last_words(self._directory), trainer=trainer, leader=self._tree.leader)

    def _remind(self) -> None:
        """Send it to the leader once more: the first may have come in a call that swallowed it."""
        for member in self._tree.members():
            if member.process_id == self._tree.leader:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(member.process_id, signal.SIGTERM)


def is_file_enough(words: LastWords | None, *, trainer: int | None, leader: int) -> bool:
    """Tell whether SIGTERM to the leader would only do harm for now.

    `trainer` is the process that beats the heart, None if none does. If it is another process than the
    leader, the signal has to wait for its last words. If it is the leader, it is one that spoke them already,
    and is ending.
    """
    if words is None or trainer is None:
        return False
    has_spoken = words.ending != "running"
    return has_spoken if trainer == leader else not has_spoken
