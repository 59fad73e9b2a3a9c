"""When the state is taken: for a checkpoint, or for a snapshot that becomes one if this process dies."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from unbroken.checkpoint.manifest import Validation
from unbroken.checkpoint.snapshot import Description
from unbroken.errors import SaveFailedError
from unbroken.state.table import TensorTable
from unbroken.training.pulse import Pulse
from unbroken.training.ranks.group import Group
from unbroken.training.save_interval import AutoInterval
from unbroken.training.save_policy import Due, SavePolicy
from unbroken.training.saver import Saver
from unbroken.training.validation import Answer, Validator

Capture = Callable[[], tuple[Description, TensorTable]]


class Saves:
    """Takes the state by `capture` when a policy, or `wanted`, says so, and hands it to `saver`.

    `validator` is asked before each checkpoint; not before a snapshot or a copy, which are taken so often, or
    in such a hurry, that asking would hold up training. Those say in their manifest that nobody asked.
    """

    def __init__(
        self,
        saver: Saver,
        capture: Capture,
        *,
        policies: Sequence[SavePolicy],
        snapshots: Sequence[SavePolicy],
        in_background: bool,
        pulse: Pulse,
        validator: Validator | None = None,
        group: Group | None = None,
    ) -> None:
        self.wanted = False
        self._is_prepared = False
        self._saver = saver
        self._capture = capture
        self._due = Due(policies)
        self._snapshot_due = Due(snapshots)
        self._in_background = in_background
        self._pulse = pulse
        self._validator = validator
        self._group = group or Group()
        self._intervals = [policy for policy in policies if isinstance(policy, AutoInterval)]

    def taken(self, step: int, epochs: int) -> None:
        """Note that the state at `step`, after `epochs` whole epochs, is kept."""
        self._due.taken(step, epochs)
        self._snapshot_due.taken(step, epochs)
        self.wanted = False

    def is_due(self, step: int, epochs: int) -> bool:
        """Tell whether this state is to be saved, as far as this rank wants it."""
        return self.wanted or self._due.is_due(step, epochs)

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background has failed."""
        return self._saver.has_failed

    def take_if_due(self, step: int, epochs: int) -> bool:
        """Save the state of now if it is due, and return True; otherwise take a snapshot if that is due."""
        for interval in self._intervals:
            interval.stepped(is_writing=self._saver.is_writing)
        # Several ranks have agreed on it before.
        if self.wanted or (self._group.is_alone and self._due.is_due(step, epochs)):
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
        """Save the state of now.

        Raises SaveFailedError if the save before this one failed, and what goes wrong in the check of
        validate=, when the state is written as one that nothing goes on from.
        """
        before, began, paused = self._pulse.phase, time.monotonic(), self._saver.paused_seconds
        self._pulse.beat("saving")
        self._is_prepared = True
        if not self._group.is_alone:
            # What became of the one before is known to all before anything is captured.
            self._group.decided(self._saver.wait)
        # Not before the first step: what is not trained may fail, and is all that there is to go back to.
        answer = self._asked() if step else Answer()
        with without_collecting():
            description, table = self._capture()
            described = dataclasses.replace(description, validation=answer.validation)
            self._saver.save(described, table, began=began)
        self._group.attempted(lambda: self._raise(answer.error))
        if not self._in_background:
            self._saver.wait()
        self._pulse.beat(before)
        self.taken(step, epochs)
        for interval in self._intervals:
            interval.saved(time.monotonic() - began - (self._saver.paused_seconds - paused))

    def _asked(self) -> Answer:
        """Return what the check says here, or else on the first rank on which the state is not good."""
        validator = self._validator
        answer = self._group.attempted(lambda: Answer() if validator is None else validator.ask())
        for rank, found in enumerate(self._group.gathered(answer.validation)):
            if found is not None and not found.passed and answer.error is None and rank != self._group.rank:
                reason = f"rank {rank}: {found.reason}"
                return Answer(validation=Validation(passed=False, reason=reason))
        return answer

    def _raise(self, error: Exception | None) -> None:
        """Raise what went wrong in the check, if anything, when the state that it was asked about is kept."""
        if error is None:
            return
        try:
            self._saver.wait()
        except SaveFailedError as failed:
            error.add_note(f"and {failed.message}")
        raise error

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
