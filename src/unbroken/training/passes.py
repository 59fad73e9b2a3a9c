"""One pass over a loader: what the user's loop over batches holds."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from unbroken.errors import UnsupportedStateError

if TYPE_CHECKING:
    from unbroken.training.replay import Slot


class Loop(Protocol):
    """Told by each pass what the script's loop does with it."""

    def before_batch(self, found: Pass) -> None:
        """The loop asks for a batch: all of its body is done. May raise to leave it."""

    def got_batch(self, found: Pass, waited_seconds: float) -> None:
        """The loop got a batch, for which it has waited so long."""

    def got_last(self, found: Pass) -> None:
        """The loop asked for a batch, and there is none left."""


class Pass:
    """One pass over the loader in `slot`, as an iterator; `is_inner` if it is nested in another.

    `delivered` counts its batches, and `steps` those that its body took with the first `used` of them.
    """

    def __init__(self, slot: Slot, batches: Iterator[Any], loop: Loop, *, is_inner: bool) -> None:
        self.slot = slot
        self.is_inner = is_inner
        self.delivered = 0
        self.steps = self.used = 0
        self.is_over = False
        self._is_left = False
        self._batches = batches
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_left:
            raise UnsupportedStateError(
                "batches: a loop over batches that began in an earlier epoch, or before the first, goes on",
                hint="begin and end every loop over run.batches inside the body of the epoch",
            )
        self._loop.before_batch(self)
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.is_over = True
            self._loop.got_last(self)
            raise
        except BaseException:
            self.is_over = True
            raise
        self.delivered += 1
        self._loop.got_batch(self, time.perf_counter() - began)
        return batch

    def note_step(self) -> None:
        """Note that the body has taken a step."""
        self.steps += 1
        self.used = self.delivered

    def leave(self) -> None:
        """End this pass early, though the script still holds it: its epoch is over."""
        self.is_over = self._is_left = True
        if isinstance(self._batches, Generator):
            self._batches.close()
