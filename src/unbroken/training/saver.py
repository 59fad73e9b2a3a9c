"""Saving beside training: the state is copied at once; another process digests and writes it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from unbroken.checkpoint.retention import RetentionPolicy
from unbroken.checkpoint.snapshot import Description
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import SaveFailedError, StorageFullError, UnbrokenError, UsageError
from unbroken.handover.client import Writer, start_writer
from unbroken.handover.committer import Committed
from unbroken.handover.slots import Slot
from unbroken.rundir.latest import point_latest
from unbroken.rundir.tell import tell
from unbroken.state.table import TensorTable
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.read_back import ReadBack
from unbroken.training.save_events import SaveEvents
from unbroken.training.settings import VerifyPolicy

# By name, for the process that writes: what it needs besides is NumPy.
_LOOK = "unbroken.frameworks.finite"


class Saver:
    """Writes one checkpoint at a time; a second one waits for the first.

    Each state goes to a slot of shared memory first. With `keeps_snapshots` there are two, and `snapshot`
    fills the one that is free: should this process die, the newest whole one becomes a checkpoint. Where
    `memory_budget_bytes` are not enough for two, there is one, and no snapshot while it is filled anew. With
    `verify` each checkpoint is read back from the disk, and what is damaged is written once more.
    """

    def __init__(
        self,
        directory: Path,
        attempt: Attempt,
        *,
        keep: Sequence[RetentionPolicy],
        keeps_snapshots: bool,
        full_disk: FullDisk,
        memory_budget_bytes: int | None = None,
        verify: VerifyPolicy = "off",
    ) -> None:
        self._directory = directory
        self._store = CheckpointStore(directory)
        self._keep = tuple(keep)
        self._full_disk = full_disk
        self._budget_bytes = memory_budget_bytes
        self._attempt = attempt
        self._events = SaveEvents(attempt, full_disk)
        self._read_back = ReadBack(verify, self._store, self._events)
        self._writer: Writer | None = None
        self._keeps_snapshots = keeps_snapshots
        self._slots = [Slot() for _ in range(2 if keeps_snapshots else 1)]
        self._sequence = 0
        self._blocked: str | None = None
        # What a save takes before its writing begins: the user's check, and the copy.
        self._capture_seconds = 0.0
        self._committed_sequence = 0
        self._newest: Committed | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unbroken-saver")
        self._in_flight: tuple[Slot, Future[bool]] | None = None

    @property
    def newest_name(self) -> str | None:
        """The name of the newest committed checkpoint."""
        return None if self._newest is None else self._newest.name

    @property
    def newest_step(self) -> int:
        """Its step, or -1 if there is none."""
        return -1 if self._newest is None else self._newest.step

    @property
    def keeps_snapshots(self) -> bool:
        """Whether a copy becomes a checkpoint when this process fails."""
        return self._keeps_snapshots

    @property
    def paused_seconds(self) -> float:
        """How long training has waited so far for a disk that was full."""
        return self._full_disk.waited_seconds

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written in the background."""
        return self._in_flight is not None and not self._in_flight[1].done()

    @property
    def has_failed(self) -> bool:
        """Whether the save in the background has failed, which `wait` raises, or waits about."""
        future = None if self._in_flight is None else self._in_flight[1]
        return future is not None and future.done() and future.exception() is not None

    def newest(self) -> Checkpoint | None:
        """Return the newest committed checkpoint, its manifest read and verified."""
        return None if self._newest is None else self._store.get(self._newest.name)

    def begin_from(self, checkpoint: Checkpoint) -> None:
        """Take over the checkpoint that this attempt was restored from."""
        self._newest = Committed(name=checkpoint.name, step=checkpoint.step)

    def prepare(self, table: TensorTable) -> None:
        """Get the memory for states like this one ready beside training, before the first is captured."""
        self._keep_within_budget(self._slots[0], table)
        for slot in self._slots:
            slot.prepare(table)
            self._share(slot)

    def save(self, description: Description, table: TensorTable, *, began: float | None = None) -> None:
        """Capture the state now and write it in the background.

        `began` is when this save did, by time.monotonic, if that was earlier. Raises SaveFailedError if
        the save before this one failed.
        """
        asked = time.monotonic()
        before = 0.0 if began is None else asked - began
        self.wait()
        free = time.monotonic()
        slot = self._free_slot()
        self._fill(slot, description, table)
        self._capture_seconds = before + time.monotonic() - free
        self._begin_write(slot)

    def snapshot(self, description: Description, table: TensorTable) -> bool:
        """Capture the state now, to be written only if this process dies.

        Returns False, and does nothing, where that would overwrite the newest whole one: one slot is being
        written, the other holds a snapshot that is newer.
        """
        self.raise_failure()
        slot = self._free_slot()
        if self._in_flight is not None and (
            slot is self._in_flight[0] or slot.sequence > self._in_flight[0].sequence
        ):
            return False
        self._fill(slot, description, table)
        return True

    def raise_failure(self) -> None:
        """Raise SaveFailedError if the save in the background has failed; waits only for a full disk."""
        if self._in_flight is not None and self._in_flight[1].done():
            self.wait()

    def wait(self) -> bool:
        """Return when nothing is being written: False if the last save was given up for a full disk.

        Raises SaveFailedError if it has failed.
        """
        if self._in_flight is None:
            return True
        slot, future = self._in_flight
        try:
            try:
                return self._end_write(future)
            except StorageFullError as error:
                # The slot still holds the state: what is tried again is the writing alone.
                return bool(
                    self._full_disk.after(
                        error, lambda: self._end_write(self._begin_write(slot)), "a checkpoint"
                    )
                )
        except SaveFailedError:
            raise
        except (UnbrokenError, OSError) as error:
            hint = error.hint if isinstance(error, UnbrokenError) else "check the disk and the mount"
            raise SaveFailedError(f"a checkpoint could not be written: {error}", hint=hint) from error

    def wait_for_the_last(self) -> None:
        """The same at the end of training, where to go on without saving would lose the state."""
        self._check_last(self.wait())

    def write_copy(self) -> None:
        """Write the copy that was made last, if it is newer than all checkpoints, and wait as above."""
        self._check_last(self.write_left())

    def _check_last(self, is_written: bool) -> None:
        if not is_written:
            raise SaveFailedError(
                f"{self._directory}: the last state could not be saved, the disk is full",
                hint="free space, then start the run again: it goes on from the last checkpoint",
            )

    @property
    def has_newer_copy(self) -> bool:
        """Whether a copy in memory is newer than all checkpoints, those being written aside."""
        return max(slot.sequence for slot in self._slots) > self._committed_sequence

    def write_left(self) -> bool:
        """Make a checkpoint of the newest snapshot, if it is newer than all; return as `wait` does."""
        is_written = self.wait()
        newest = max(self._slots, key=lambda slot: slot.sequence)
        if newest.sequence > self._committed_sequence:
            self._capture_seconds = 0.0
            self._begin_write(newest)
            is_written = self.wait()
        return is_written

    def forget_copies(self) -> None:
        """Let no copy of a state that is in memory now become a checkpoint; call it after `wait`."""
        assert self._in_flight is None, "asked to forget a copy that is being written"
        for slot in self._slots:
            slot.forget()

    def close(self) -> None:
        """End thread and process; what is being written is finished first."""
        self._thread.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close()
        for slot in self._slots:
            slot.close()

    def _free_slot(self) -> Slot:
        """Return the slot whose state is needed least: not the one being written, and of two the older."""
        free = [slot for slot in self._slots if self._in_flight is None or slot is not self._in_flight[0]]
        return min(free or self._slots, key=lambda slot: slot.sequence)

    def _fill(self, slot: Slot, description: Description, table: TensorTable) -> None:
        self._keep_within_budget(slot, table)
        self._sequence += 1
        described = dataclasses.replace(description, parent=self.newest_name)
        slot.fill(described, table, self._sequence)
        self._share(slot)

    def _keep_within_budget(self, slot: Slot, table: TensorTable) -> None:
        """Do with `slot` alone if there is no room for two; raises UsageError if there is none for one."""
        if self._budget_bytes is None:
            return
        size = slot.needs(table)
        if size > self._budget_bytes:
            raise UsageError(
                f"Run: expected a copy of the state to take at most {self._budget_bytes:,} bytes of memory, "
                f"found {size:,}",
                hint="raise memory_budget_bytes, or leave it out",
            )
        if len(self._slots) * size > self._budget_bytes and self._in_flight is None:
            for other in self._slots:
                if other is not slot:
                    other.close()
            self._slots = [slot]

    def _share(self, slot: Slot) -> None:
        if self._writer is None:
            self._writer = start_writer(
                self._directory,
                self._attempt.number,
                size_bytes=slot.size_bytes,
                outlives=self._keeps_snapshots,
                parent=self.newest_name,
                look=_LOOK,
            )
        self._writer.share(slot)

    def _begin_write(self, slot: Slot) -> Future[bool]:
        # One that is tried again, when there is space, has begun again.
        future = self._thread.submit(self._write, slot, time.monotonic() - self._capture_seconds)
        self._in_flight = slot, future
        return future

    def _end_write(self, future: Future[bool]) -> bool:
        # First the waiting: whoever interrupts it must not find the slot free that is being written.
        futures.wait([future])
        self._in_flight = None
        return future.result()

    def _write(self, slot: Slot, began: float) -> bool:
        """Let the process write, then say so and prune; True when that is done. In the thread."""
        writer = self._writer
        assert writer is not None, "asked to write before anything was captured"
        # The slot still holds the state when it is to be written once more.
        committed = self._read_back.write(writer, lambda: self._commit(writer, slot, began))
        self._newest = committed
        self._committed_sequence = max(self._committed_sequence, slot.sequence)
        if committed.is_good:
            point_latest(self._directory, committed.name)
        else:
            self._events.bad_state(committed)
        self._prune(committed, writer)
        return True

    def _commit(self, writer: Writer, slot: Slot, began: float) -> Committed:
        try:
            committed = writer.commit(slot)
        except UnbrokenError as error:
            self._events.note("save-failed", error=error.kind, message=error.message)
            raise
        self._attempt.heartbeat.save_seconds = time.monotonic() - began
        self._events.note("saved", step=committed.step, checkpoint=committed.name)
        return committed

    def _prune(self, newest: Committed, writer: Writer) -> None:
        if not self._keep:
            return
        try:
            plan = self._store.prune(
                self._keep,
                run_id=self._attempt.run.run_id,
                is_intact=lambda name: self._read_back.is_intact(writer, name),
            )
        except StorageFullError as error:
            # The next save prunes again.
            self._full_disk.lose(error, "pruning of older checkpoints")
            return
        except UnbrokenError as error:
            self._events.note("prune-failed", checkpoint=newest.name, message=error.message)
            raise SaveFailedError(
                f"{newest.name} is saved, but older checkpoints could not be pruned: {error.message}",
                hint=error.hint,
            ) from error
        if plan.blocked is not None:
            self._events.note("prune-blocked", reason=plan.blocked)
            if plan.blocked != self._blocked:
                tell(f"nothing is pruned: {plan.blocked}")
        self._blocked = plan.blocked
        for name, reason in plan.pruned.items():
            self._events.note("pruned", checkpoint=name, reason=reason)
