"""verify=: what was written is read back from the disk; what is damaged is set aside and written again."""

from __future__ import annotations

from collections.abc import Callable

from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import SaveFailedError, UnbrokenError
from unbroken.handover.client import Writer
from unbroken.handover.committer import Committed
from unbroken.rundir.tell import tell
from unbroken.training.save_events import SaveEvents
from unbroken.training.settings import VerifyPolicy

# How the reason of what is set aside here begins: what was in it is written again.
READ_BACK_DAMAGED = "read back damaged: "
_HINT = (
    "look at the kernel's log for errors of the disk or of its controller, and test the memory; "
    "`unbroken verify` reads all checkpoints, and a restart passes over those that are damaged"
)


class ReadBack:
    """Holds what is written in `store` against what the disk gives back, as far as `policy` says."""

    def __init__(self, policy: VerifyPolicy, store: CheckpointStore, events: SaveEvents) -> None:
        self._policy = policy
        self._store = store
        self._events = events
        # The checkpoint that was read back whole, if the newest was.
        self._whole: str | None = None

    def write(self, writer: Writer, commit: Callable[[], Committed]) -> Committed:
        """Return what `commit` has written and `writer` has read back; what was damaged is written once more.

        Raises SaveFailedError if that is damaged, too: a disk that damages one write after the other keeps
        nothing.
        """
        for is_last in (False, True):
            committed = commit()
            damage = self._damage(writer, committed.name)
            if not damage:
                break
            self._set_aside(committed.name, damage, is_last=is_last)
        return committed

    def is_intact(self, writer: Writer, name: str) -> bool:
        """Tell whether all of the checkpoint `name` is as it should be; it is read only once."""
        return name == self._whole or writer.is_intact(name)

    def _damage(self, writer: Writer, name: str) -> str:
        self._whole = None
        if self._policy == "off":
            return ""
        try:
            damage = writer.damage(name, sampled=self._policy == "sampled")
        except UnbrokenError as error:
            # The process that reads has died: the checkpoint is there, and as good as without reading it.
            self._events.note("verify-failed", checkpoint=name, message=error.message)
            tell(f"{name} could not be read back: {error.message}")
            return ""
        if not damage and self._policy == "always":
            self._whole = name
        return damage

    def _set_aside(self, name: str, damage: str, *, is_last: bool) -> None:
        place = self._store.quarantine(name, f"{READ_BACK_DAMAGED}{damage}")
        self._events.note("damaged", checkpoint=name, found=damage, place=place)
        what_now = "so was what was written again: saving stops" if is_last else "it is written once more"
        text = f"{name} was read back damaged ({damage}), now in {place}; {what_now}"
        self._events.alarm("damaged", text, _HINT)
        if is_last:
            raise SaveFailedError(f"{name} was read back damaged twice: {damage}", hint=_HINT)
