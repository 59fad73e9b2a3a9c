"""Saving beside training: the state is copied at once, digested and written by a thread."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from unbroken.checkpoint.retention import RetentionPolicy
from unbroken.checkpoint.snapshot import Description, HostBuffers, Snapshot, capture
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import SaveFailedError, UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.journal import Journal
from unbroken.state.tree import TensorTable


class Saver:
    """Writes one checkpoint at a time; a second one waits for the first.

    `may_commit` is called just before a checkpoint becomes visible, and raises if this process must
    not write any more.
    """

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        *,
        run_id: str,
        keep: Sequence[RetentionPolicy],
        may_commit: Callable[[], None],
    ) -> None:
        self.newest: Checkpoint | None = None
        self._directory = directory
        self._store = CheckpointStore(directory)
        self._journal = journal
        self._run_id = run_id
        self._keep = tuple(keep)
        self._may_commit = may_commit
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unbroken-saver")
        self._in_flight: Future[None] | None = None

    @property
    def newest_name(self) -> str | None:
        """The name of the newest committed checkpoint."""
        return None if self.newest is None else self.newest.name

    def save(self, description: Description, table: TensorTable) -> None:
        """Capture the state now and write it in the background.

        Raises SaveFailedError if the save before this one failed.
        """
        self.wait()
        # The buffers are free: the save that used them has ended.
        described = dataclasses.replace(description, parent=self.newest_name)
        snapshot = capture(described, table, self._buffers)
        self._in_flight = self._thread.submit(self._write, snapshot)

    def raise_failure(self) -> None:
        """Raise SaveFailedError if the save in the background has failed; never waits."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written. Raises SaveFailedError if the save has failed."""
        future, self._in_flight = self._in_flight, None
        if future is None:
            return
        try:
            future.result()
        except SaveFailedError:
            raise
        except (UnbrokenError, OSError) as error:
            hint = error.hint if isinstance(error, UnbrokenError) else "check the disk and the mount"
            raise SaveFailedError(f"a checkpoint could not be written: {error}", hint=hint) from error

    def close(self) -> None:
        """End the thread; what is being written is finished first."""
        self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.description.step
        try:
            self.newest = checkpoint = self._store.save(snapshot, before_commit=self._may_commit)
        except UnbrokenError as error:
            self._journal.append("save-failed", step=step, error=error.kind, message=error.message)
            raise
        self._journal.append("saved", step=step, checkpoint=checkpoint.name)
        self._journal.sync()
        self._point_latest(checkpoint.name)
        self._prune(checkpoint)

    def _prune(self, newest: Checkpoint) -> None:
        if not self._keep:
            return
        try:
            plan = self._store.prune(self._keep, run_id=self._run_id)
        except UnbrokenError as error:
            self._journal.append("prune-failed", checkpoint=newest.name, message=error.message)
            raise SaveFailedError(
                f"{newest.name} is saved, but older checkpoints could not be pruned: {error.message}",
                hint=error.hint,
            ) from error
        for name, reason in plan.pruned.items():
            self._journal.append("pruned", checkpoint=name, reason=reason)

    def _point_latest(self, name: str) -> None:
        link = self._directory / layout.LATEST_LINK
        # One name for all: what a killed process left is replaced by the next, not kept for ever.
        temporary = link.with_name(f".{layout.LATEST_LINK}-new")
        # A convenience for people: a file system without symbolic links does without it.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"{layout.CHECKPOINTS}/{name}")
            os.replace(temporary, link)
