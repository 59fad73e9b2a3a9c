"""What the ranks tell each other between two steps: who was asked to stop, and who wants a checkpoint."""

from __future__ import annotations

from unbroken.training.preemption import Requests
from unbroken.training.ranks.group import Group, Where


class AgreedRequests(Requests):
    """The requests to all ranks, as far as they have told each other; `own` are those to this one."""

    def __init__(self, own: Requests, group: Group) -> None:
        self._own = own
        self._group = group
        self._reason: str | None = None

    def install(self) -> bool:
        return self._own.install()

    def remove(self) -> None:
        self._own.remove()

    def stop_reason(self) -> str | None:
        return self._reason

    def take_save(self) -> bool:
        """Those are taken when the ranks agree."""
        return False

    def agree(self, where: Where, step: int, *, wants_save: bool, has_failed: bool) -> tuple[bool, bool]:
        """Ask all ranks, between the same two steps; return whether any wants a save, or has failed.

        Raises UsageError if they stand elsewhere.
        """
        reason = self._own.stop_reason()
        wants_save = self._own.take_save() or wants_save
        found = self._group.votes(where, step, reason is not None, wants_save, has_failed)
        if any(stops for stops, _, _ in found):
            reasons = self._group.gathered(reason)
            rank = next(rank for rank, one in enumerate(reasons) if one is not None)
            self._reason = str(reasons[rank]) if rank == 0 else f"{reasons[rank]} on rank {rank}"
        return any(wants for _, wants, _ in found), any(failed for _, _, failed in found)
