"""One pass over a loader: what the user's loop over batches holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unbroken.errors import UnsupportedStateError
from unbroken.rundir.rollbacks import Window
from unbroken.training.leaving_out import last_left_out, process_generators_kept

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

    def read_past(self, found: Pass) -> None:
        """A batch was read that is left out."""

    def left_out(self, found: Pass, first: int, samples: list[Any]) -> None:
        """The batches from number `first` to the one before the next were left out, with these samples."""


class Pass:
    """One pass over the loader in `slot`, as an iterator; `is_inner` if it is nested in another.

    `place` is its epoch and its index among the passes of that epoch, None if it is nested. `delivered`
    counts the batches that this process got of it, and `steps` those that its body took with the first
    `used` of them. `slot.number` is that of the next batch, whatever process got the ones before.
    `windows` are the batches that are left out.
    """

    def __init__(
        self,
        slot: Slot,
        batches: Iterator[Any],
        loop: Loop,
        *,
        is_inner: bool,
        place: tuple[int, int] | None = None,
        windows: Sequence[Window] = (),
    ) -> None:
        self.slot = slot
        self.is_inner = is_inner
        self.place = place
        self.windows = windows
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
            if self.windows:
                self._leave_out()
            batch = next(self._batches)
        except StopIteration:
            self.is_over = True
            self._loop.got_last(self)
            raise
        except BaseException:
            self.is_over = True
            raise
        self.delivered += 1
        self.slot.number += 1
        self._loop.got_batch(self, time.perf_counter() - began)
        return batch

    def _leave_out(self) -> None:
        """Read past the batches that are to be left out here, if any are."""
        slot = self.slot
        while (last := last_left_out(self.windows, self.place, slot.number)) is not None:
            first, samples = slot.number, list[Any]()
            try:
                with process_generators_kept():
                    while slot.number <= last:
                        next(self._batches)
                        slot.number += 1
                        samples.append(None if slot.batches is None else slot.batches.samples(1))
                        self._loop.read_past(self)
            finally:
                if samples:
                    self._loop.left_out(self, first, samples)

    def again(self, windows: Sequence[Window]) -> Iterator[Any]:
        """Yield the batches that follow, without those of `windows`, and tell nobody: they are no training.

        After that this pass stands nowhere in particular, until `go_on_with`.
        """
        number, end = self.slot.number, object()
        while True:
            last = last_left_out(windows, self.place, number)
            if last is not None:
                with process_generators_kept():
                    batch = next(self._batches, end)
            else:
                batch = next(self._batches, end)
            if batch is end:
                return
            number += 1
            if last is None:
                yield batch

    def note_step(self) -> None:
        """Note that the body has taken a step."""
        self.steps += 1
        self.used = self.delivered

    def go_on_with(self, begin: Callable[[], Iterator[Any]], windows: Sequence[Window]) -> None:
        """Go on with the batches that `begin` gives, once the ones until now are let go of."""
        self._let_go()
        self._batches, self.windows = begin(), windows
        self.delivered = self.steps = self.used = 0

    def leave(self) -> None:
        """End this pass early, though the script still holds it: its epoch is over."""
        self.is_over = self._is_left = True
        self._let_go()

    def _let_go(self) -> None:
        if isinstance(self._batches, Generator):
            self._batches.close()
