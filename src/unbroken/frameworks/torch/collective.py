"""What the ranks of torch.distributed tell each other between two steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from unbroken.errors import UsageError

# One that is still loading its data may be late.
_MEETING = timedelta(minutes=10)
# One rank may evaluate, or wait for a full disk, as long as it likes; one that dies is noticed at once.
_PATIENCE = timedelta(days=30)
_KNOWN: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


class Ranks:
    """All ranks of the default group. Each method is called by every rank at the same place of its step.

    Never in a background thread: collectives there would meet those of training.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self._meet_in_store()
        # A group of their own, on the host: nothing that is said here waits for a device, and a rank that is
        # elsewhere never takes it for a gradient.
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def _meet_in_store(self) -> None:
        """Wait for all ranks where one that does not come can be told: to make a group only hangs."""
        store = distributed.distributed_c10d._get_default_store()
        names = [f"unbroken-{len(_KNOWN)}-{rank}" for rank in range(self.world_size)]
        store.set(names[self.rank], "here")
        try:
            store.wait(names, _MEETING)
        except RuntimeError as error:
            raise _absent(self.world_size, error) from error

    def meet(self) -> None:
        """Return when all ranks are here; raise UsageError if one is not in time."""
        try:
            distributed.monitored_barrier(self._group, timeout=_MEETING, wait_all_ranks=True)
        except RuntimeError as error:
            raise _absent(self.world_size, error) from error

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in order; as many from each. One small collective."""
        own = torch.tensor(mine, dtype=torch.int64)
        found = [torch.zeros_like(own) for _ in range(self.world_size)]
        distributed.all_gather(found, own, group=self._group)
        return [each.tolist() for each in found]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order; plain values only."""
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def collect(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks to the first one, None to the others."""
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        distributed.gather_object(value, found, dst=0, group=self._group)
        return found

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first rank."""
        held = [value]
        distributed.broadcast_object_list(held, src=0, group=self._group, device=torch.device("cpu"))
        return held[0]


def ranks() -> Ranks | None:
    """Return the ranks, or None where torch.distributed has not been initialised or has one alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size() < 2:
        return None
    group = distributed.group.WORLD
    if group not in _KNOWN:
        # Once for each group: to make another for what is said here is a collective, too.
        _KNOWN[group] = Ranks()
    return _KNOWN[group]


def _absent(world_size: int, error: Exception) -> UsageError:
    return UsageError(
        f"Run: expected all {world_size} ranks to enter it, found that one does not "
        f"(waited {_MEETING.total_seconds():.0f} s: {str(error).splitlines()[0]:.200})",
        hint="make the Run on every rank, with the same directory, after init_process_group; or on one rank "
        "before it",
    )
