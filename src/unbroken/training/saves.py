"""When the state is taken: for a checkpoint, or for a snapshot that becomes one if this process dies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from unbroken.checkpoint.snapshot import Description
from unbroken.state.table import TensorTable
from unbroken.training.pulse import Pulse
from unbroken.training.save_policy import Due, SavePolicy
from unbroken.training.saver import Saver

Capture = Callable[[], tuple[Description, TensorTable]]


class Saves:
    """Takes the state by `capture` when a policy, or `wanted`, says so, and hands it to `saver`."""

    def __init__(
        self,
        saver: Saver,
        capture: Capture,
        *,
        policies: Sequence[SavePolicy],
        snapshots: Sequence[SavePolicy],
        in_background: bool,
        pulse: Pulse,
    ) -> None:
        self.wanted = False
        self._is_prepared = False
        self._saver = saver
        self._capture = capture
        self._due = Due(policies)
        self._snapshot_due = Due(snapshots)
        self._in_background = in_background
        self._pulse = pulse

    def taken(self, step: int, epochs: int) -> None:
        """Note that the state at `step`, after `epochs` whole epochs, is kept."""
        self._due.taken(step, epochs)
        self._snapshot_due.taken(step, epochs)
        self.wanted = False

    def take_if_due(self, step: int, epochs: int) -> bool:
        """Save the state of now if it is due, and return True; otherwise take a snapshot if that is due."""
        if self.wanted or self._due.is_due(step, epochs):
            self.save(step, epochs)
            return True
        if step and not self._is_prepared:
            # After a step the optimizer has its state, so that its size is known.
            self._is_prepared = True
            self._saver.prepare(self._capture()[1])
        if self._snapshot_due.is_due(step, epochs):
            with without_collecting():
                taken = self._saver.snapshot(*self._capture())
            if taken:
                self._snapshot_due.taken(step, epochs)
        return False

    def save(self, step: int, epochs: int) -> None:
        """Save the state of now. Raises SaveFailedError if the save before this one failed."""
        before = self._pulse.phase
        self._pulse.beat("saving")
        self._is_prepared = True
        with without_collecting():
            self._saver.save(*self._capture())
        if not self._in_background:
            self._saver.wait()
        self._pulse.beat(before)
        self.taken(step, epochs)

    def copy(self) -> bool:
        """Copy the state of now, to be written should it be wanted; False if there is no room just now."""
        self._is_prepared = True
        with without_collecting():
            return self._saver.snapshot(*self._capture())

    def raise_failure(self) -> None:
        """Raise SaveFailedError if a save in the background has failed."""
        self._saver.raise_failure()


@contextmanager
def without_collecting() -> Iterator[None]:
    """Keep the garbage collector off: a state of many tensors makes it walk all objects, many times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
