"""Makes checkpoints of the snapshots in slots: the work of the writer process, wherever it is done."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.checkpoint.digests import CountNonFinite
from unbroken.checkpoint.highlights import non_finite_in_words
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.verify import verify_checkpoint, verify_sample
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.errors import StorageError, UnbrokenError
from unbroken.handover.slots import SlotReader
from unbroken.rundir import layout
from unbroken.rundir.identity import check_not_superseded
from unbroken.rundir.processes import ProcessIdentity
from unbroken.rundir.tell import tell
from unbroken.storage.local import LocalStorage

_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that was written, and the step it is of.

    `not_finite` says what in it is not, and `invalid` why the user's own check has refused it.
    """

    name: str
    step: int
    not_finite: str = ""
    invalid: str = ""

    @property
    def is_good(self) -> bool:
        """Whether a run may go on from it by itself."""
        return not self.not_finite and not self.invalid


class Committer:
    """Writes for attempt `attempt` of the run in `directory`, as long as `trainer` holds it.

    `parent` is a checkpoint that is known to be intact: what is unchanged since is shared with it. `look` is
    the module whose `count_non_finite` tells what is not finite: it needs more than what writing does.
    """

    def __init__(
        self,
        directory: Path,
        attempt: int,
        trainer: ProcessIdentity,
        *,
        parent: str | None = None,
        sequence: int = 0,
        look: str | None = None,
    ) -> None:
        self._count = None if look is None else _counter(look)
        self._store = CheckpointStore(directory)
        self._may_commit: Callable[[], None] = lambda: check_not_superseded(directory, attempt, trainer)
        self._parent = _manifest_of(self._store, parent)
        self.sequence = self._sequence_before = sequence

    def commit(self, slot: SlotReader) -> Committed:
        """Write the snapshot in `slot` as a checkpoint. Raises StorageError, StaleWriterError."""
        found = slot.read()
        assert found is not None, "asked to commit a slot without a whole snapshot"
        name = self._store.next_name(found.snapshot.description.step)
        self._parent = write_checkpoint(
            self._store.storage,
            found.snapshot,
            name,
            before_commit=self._may_commit,
            parent=self._parent,
            count_non_finite=self._count,
        )
        self._sequence_before, self.sequence = self.sequence, max(self.sequence, found.sequence)
        validation = self._parent.validation
        return Committed(
            name=name,
            step=found.snapshot.description.step,
            not_finite=non_finite_in_words(self._parent.non_finite or {}),
            invalid="" if validation is None or validation.passed else validation.reason,
        )

    def newest_left(self, slots: list[SlotReader]) -> SlotReader | None:
        """Return the slot with the newest whole snapshot that is no checkpoint yet, or None."""
        newest = max(slots, key=SlotReader.sequence, default=None)
        return newest if newest is not None and newest.sequence() > self.sequence else None

    def is_intact(self, name: str) -> bool:
        """Read back all of the checkpoint `name`; what is damaged is not shared with later ones."""
        parent, self._parent = self._parent, None
        intact = verify_checkpoint(self._store.storage, f"{layout.CHECKPOINTS}/{name}").is_intact
        if intact:
            # Not if it could not even be read: then nothing later shares anything with it.
            self._parent = parent
        return intact

    def damage(self, name: str, *, sampled: bool) -> str:
        """Read the checkpoint `name` back from the disk, or some of it, and return what is damaged in it.

        Nothing later shares anything with one that is, and its slot is left to be written again. Earlier ones
        that share a damaged file with it are named.
        """
        storage, tree = self._store.storage, f"{layout.CHECKPOINTS}/{name}"
        parent, self._parent = self._parent, None
        try:
            # Or the kernel would answer, from the very bytes that it was given.
            if isinstance(storage, LocalStorage):
                storage.drop_cached(tree)
            found = (verify_sample if sampled else verify_checkpoint)(storage, tree).findings
            damage = "; ".join(f"{one.file}: {one.problem}" for one in found[:_FEW])
            damage += self._sharing(name, {one.file for one in found})
        except StorageError as error:
            # What cannot be read is no checkpoint.
            damage = error.message
        if damage:
            self.sequence = self._sequence_before
        else:
            self._parent = parent
        return damage

    def _sharing(self, name: str, files: Collection[str]) -> str:
        """Return in words which other checkpoints hold one of `files` of the checkpoint `name`, if any do."""
        storage = self._store.storage
        if not files or not isinstance(storage, LocalStorage):
            return ""
        place = storage.root / layout.CHECKPOINTS
        damaged = [place / name / file for file in files]
        others = [
            other
            for other in self._store.names()
            if other != name and any(_are_same(file, place / other / file.name) for file in damaged)
        ]
        more = f" and {len(others) - _FEW} more" if len(others) > _FEW else ""
        return f"; the same file belongs to {', '.join(others[-_FEW:])}{more}" if others else ""


def _are_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        # One of them has gone.
        return False


def _counter(module: str) -> CountNonFinite | None:
    try:
        found: CountNonFinite = importlib.import_module(module).count_non_finite
    except ImportError as error:
        tell(f"checkpoints are not looked through for NaN: {error}", "install NumPy")
        return None
    return found


def _manifest_of(store: CheckpointStore, name: str | None) -> Manifest | None:
    # Without it the next checkpoint is written as a whole, and that is all.
    with suppress(UnbrokenError):
        return None if name is None else store.get(name).manifest
    return None
