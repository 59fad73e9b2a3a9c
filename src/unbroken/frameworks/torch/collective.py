"""What the ranks of torch.distributed tell each other in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


class Ranks:
    """All ranks of the default group. Each method is called by every rank at the same place of its step.

    Never in a background thread: collectives there would meet those of training.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        # The collectives of NCCL take tensors on devices alone.
        on_device = distributed.get_backend() == "nccl"
        self._flag = torch.zeros(1, dtype=torch.int32, device="cuda" if on_device else "cpu")

    def any(self, is_so: bool) -> bool:
        """Return whether it is so on any rank; one small collective."""
        self._flag.fill_(int(is_so))
        distributed.all_reduce(self._flag, op=distributed.ReduceOp.MAX)
        return bool(self._flag.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order; plain values only."""
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, value)
        return found


def ranks() -> Ranks | None:
    """Return the ranks, or None where torch.distributed has not been initialised or has one alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return Ranks() if distributed.get_world_size() > 1 else None
