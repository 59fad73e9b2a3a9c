"""Which samples were in the batches that a loader has handed out last."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

# So many batches are remembered, or fewer if they are large: an index costs about 40 bytes.
_MOST_BATCHES = 1024
_MOST_SAMPLES = 1 << 19


class Delivered:
    """The indices of the newest batches of a pass, as its sampler gave them; nothing is copied."""

    def __init__(self) -> None:
        self._batches: deque[Sequence[Any]] = deque()
        self._samples = 0

    def add(self, indices: Sequence[Any]) -> None:
        """Take note of a batch that was handed out."""
        self._batches.append(indices)
        self._samples += len(indices)
        if self._samples > _MOST_SAMPLES or len(self._batches) > _MOST_BATCHES:
            # The newest stays, however large it is.
            while len(self._batches) > 1 and (
                self._samples > _MOST_SAMPLES or len(self._batches) > _MOST_BATCHES
            ):
                self._samples -= len(self._batches.popleft())

    def samples(self, back: int) -> list[Any] | None:
        """Return the indices in the batch `back` ago, 1 being the newest; None if that is not known."""
        if not 1 <= back <= len(self._batches):
            return None
        return [_plain(index) for index in self._batches[-back]]


def _plain(index: Any) -> Any:
    """Return an index as a value that can be written down."""
    if isinstance(index, tuple | list):
        return [_plain(item) for item in index]
    return index.__index__() if hasattr(index, "__index__") else index
