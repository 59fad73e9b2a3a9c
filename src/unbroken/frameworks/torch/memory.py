"""What torch knows of the memory of the device that it computes on."""

from __future__ import annotations

from typing import Any

import torch

from unbroken.rundir.host_memory import Use


class DeviceMemory:
    """The memory of the current CUDA device; nothing is read before the script has used it.

    What counts is the most that tensors took at any one time: what the allocator keeps besides, it can
    use again, but for what is lost between blocks. `cuda` has the functions of `torch.cuda`.
    """

    name = "the device's memory"
    # The allocator's statistics are some hundred numbers, and the driver is asked.
    every_seconds = 2.0

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = torch.cuda if cuda is None else cuda
        # A build without CUDA lacks what is asked for.
        self._is_built = cuda is not None or bool(torch.version.cuda or torch.version.hip)

    def read(self) -> Use | None:
        # Asking would make a context, which takes memory itself and must not be in a parent of forks.
        if not self._is_built or not self._cuda.is_initialized():
            return None
        free, total = self._cuda.mem_get_info()
        peak, reserved = self._cuda.max_memory_allocated(), self._cuda.memory_reserved()
        return Use(used_bytes=total - free - reserved + peak, limit_bytes=total, own_bytes=peak)

    def close(self) -> None:
        """There is nothing to release."""
