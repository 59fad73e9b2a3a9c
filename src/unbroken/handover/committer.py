"""Makes checkpoints of the snapshots in slots: the work of the writer process, wherever it is done."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.checkpoint.digests import CountNonFinite
from unbroken.checkpoint.highlights import non_finite_in_words
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.errors import UnbrokenError
from unbroken.handover.slots import SlotReader
from unbroken.rundir import layout
from unbroken.rundir.identity import check_not_superseded
from unbroken.rundir.processes import ProcessIdentity
from unbroken.rundir.tell import tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that was written, and the step it is of; `not_finite` says what in it is not."""

    name: str
    step: int
    not_finite: str = ""


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
        self.sequence = sequence

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
        self.sequence = max(self.sequence, found.sequence)
        bad = non_finite_in_words(self._parent.non_finite or {})
        return Committed(name=name, step=found.snapshot.description.step, not_finite=bad)

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
