"""The trainer's end: starts the writer process, and says what to do with the slots that were filled."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from unbroken.errors import StorageError
from unbroken.handover.child import Child, NoProcessError
from unbroken.handover.committer import Committed, Committer
from unbroken.handover.messages import Reply, Request, Start, committed_of, raised
from unbroken.handover.slots import Slot, SlotReader
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.processes import identify, identify_self
from unbroken.rundir.tell import tell

_OWN_PROCESS_BYTES = 1 << 20
_FIRST_PROCESS = 1


class Writer(Protocol):
    """Makes checkpoints of slots, one at a time; all but `share` is called from one thread at a time."""

    def commit(self, slot: Slot) -> Committed:
        """Write what is in `slot`. Raises what `Committer.commit` does."""
        ...

    def is_intact(self, name: str) -> bool:
        """Read back the checkpoint `name`."""
        ...

    def damage(self, name: str, *, sampled: bool) -> str:
        """Read the checkpoint `name`, or some of it, back from the disk; return what is damaged in it."""
        ...

    def share(self, slot: Slot) -> None:
        """Make `slot` known: from here on what is in it outlives this process, where anything does."""
        ...

    def close(self) -> None:
        """End; what is in the slots is given up."""
        ...


def start_writer(
    directory: Path,
    attempt: int,
    *,
    size_bytes: int,
    outlives: bool,
    parent: str | None,
    look: str | None = None,
) -> Writer:
    """Return a writer for states of about `size_bytes`; one that `outlives` this process is another process.

    A small state is written before a process has started, and that costs more than it saves. `look` is
    the module that tells what is not finite.
    """
    if not outlives and size_bytes < _OWN_PROCESS_BYTES:
        # What the program itself does not use is not loaded into it.
        return WriterHere(directory, attempt, parent, look if "numpy" in sys.modules else None)
    if outlives and os.getpid() == _FIRST_PROCESS:
        tell(
            "this is the first process of its container, nothing in which outlives it, snapshots neither",
            "start it by `unbroken run`, or the container with --init",
        )
    return WriterProcess(directory, attempt, parent, look)


class WriterHere:
    """Writes in the process that trains: its last snapshot dies with it."""

    def __init__(
        self, directory: Path, attempt: int, parent: str | None = None, look: str | None = None
    ) -> None:
        self._committer = Committer(directory, attempt, identify_self(), parent=parent, look=look)
        self._readers: dict[Slot, SlotReader] = {}

    def commit(self, slot: Slot) -> Committed:
        if slot not in self._readers:
            self._readers[slot] = SlotReader(slot.descriptor)
        return self._committer.commit(self._readers[slot])

    def is_intact(self, name: str) -> bool:
        return self._committer.is_intact(name)

    def damage(self, name: str, *, sampled: bool) -> str:
        return self._committer.damage(name, sampled=sampled)

    def share(self, slot: Slot) -> None:
        """Nothing outlives this process."""

    def close(self) -> None:
        self._readers.clear()


class WriterProcess:
    """Writes in a process that is there from the start, and outlives this one to finish what it left.

    One that has died (out of memory) makes the save in hand fail, and is replaced by another. Where none
    can be started (an interpreter that is part of another program) this process writes, and says so.
    """

    def __init__(
        self, directory: Path, attempt: int, parent: str | None = None, look: str | None = None
    ) -> None:
        self._directory = directory
        self._look = look
        self._attempt = attempt
        # Once: the name of the host, a part of it, may change.
        self._trainer = identify_self()
        self._newest, self._sequence, self._sequence_before = parent, 0, 0
        self._slots: list[Slot] = []
        # Training shares slots while its saving thread asks; only sending, never waiting, is under the lock.
        self._lock = threading.Lock()
        self._is_asking = False
        self._number = 0
        self._child: Child | None = None
        self._here: WriterHere | None = None
        self._revive()

    def commit(self, slot: Slot) -> Committed:
        reply = self._ask(lambda child: Request(do="commit", number=self._number, slot=child.index(slot)))
        if reply is None:
            return self._writer_here().commit(slot)
        self._sequence_before = self._sequence
        self._newest, self._sequence = reply.name, slot.sequence
        return committed_of(reply)

    def is_intact(self, name: str) -> bool:
        reply = self._ask(lambda _: Request(do="verify", number=self._number, name=name))
        return self._writer_here().is_intact(name) if reply is None else reply.is_intact

    def damage(self, name: str, *, sampled: bool) -> str:
        reply = self._ask(lambda _: Request(do="read-back", number=self._number, name=name, sampled=sampled))
        found = self._writer_here().damage(name, sampled=sampled) if reply is None else reply.damage
        if found and name == self._newest:
            # Another process, if there is to be one, shares nothing with it either, and writes it again.
            self._newest, self._sequence = None, self._sequence_before
        return found

    def share(self, slot: Slot) -> None:
        with self._lock:
            if slot not in self._slots:
                self._slots.append(slot)
            # One that dies while it is asked is the business of the one who asks.
            child = self._child if self._is_asking else self._revive()
            if child is not None:
                child.index(slot)

    def close(self) -> None:
        # In a forked child: the process is its parent's.
        if self._child is not None and os.getpid() == self._trainer.process_id:
            self._child.close()

    def _ask(self, request: Callable[[Child], Request]) -> Reply | None:
        """Return the answer to `request`, or None where there is no process to be asked."""
        with self._lock:
            child = self._revive()
            if child is None:
                return None
            self._number += 1
            child.send(request(child))
            self._is_asking = True
        try:
            reply = child.receive(self._number)
            if reply is None:
                raise child.lost()
        except NoProcessError as error:
            with self._lock:
                self._child = None
                child.close()
                self._do_without(error)
            return None
        finally:
            self._is_asking = False
        if reply.failure is not None:
            raise raised(reply.failure)
        return reply

    def _revive(self) -> Child | None:
        """Return a process that lives, a new one if the last has died; None where there can be none."""
        if self._here is not None or (self._child is not None and not self._child.has_ended):
            return self._child
        dead, self._child = self._child, None
        try:
            if dead is not None:
                error = dead.lost()
                dead.close()
                if isinstance(error, NoProcessError):
                    raise error
                tell(f"{error.message}; another takes its place")
            self._child = self._start()
            # All of them: the newest snapshot may lie in another than the one at hand.
            for slot in self._slots:
                self._child.index(slot)
        except (OSError, NoProcessError) as error:
            self._do_without(error)
        return self._child

    def _start(self) -> Child:
        if not sys.executable or hasattr(sys, "frozen"):
            raise OSError("this program is no Python interpreter of its own")
        start = Start(
            directory=str(self._directory.resolve()),
            attempt=self._attempt,
            trainer=self._trainer.to_json(),
            parent=self._newest,
            sequence=self._sequence,
            look=self._look,
        )
        child = Child(start)
        identity = identify(child.process_id)
        place = layout.attempt_directory(self._directory, self._attempt) / layout.WRITER_PROCESS
        if identity is not None:
            # On a full disk the next attempt does without: it does not wait for what this one leaves.
            with suppress(StorageError):
                write_json(place, identity.to_json(), durable=False)
        return child

    def _do_without(self, error: Exception) -> None:
        tell(
            f"no process to write checkpoints: {error}",
            "training writes them itself, and its snapshots do not outlive it",
        )
        self._here = WriterHere(self._directory, self._attempt, self._newest, self._look)

    def _writer_here(self) -> WriterHere:
        assert self._here is not None, "asked to write here although there is a process"
        return self._here
