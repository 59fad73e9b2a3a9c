"""Between two steps, where the state is whole: failed saves, requests, what is due."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unbroken.training.ending import Ending
from unbroken.training.health.recovery import Recovery
from unbroken.training.passes import Pass
from unbroken.training.preemption import Requests, StopRequested
from unbroken.training.pulse import Pulse
from unbroken.training.ranks.agreement import AgreedRequests
from unbroken.training.ranks.group import Group, Where
from unbroken.training.rehearsing import Rehearsal
from unbroken.training.saves import Saves
from unbroken.training.unkept import UnkeptWatch
from unbroken.training.whole_state import WholeState

# An evaluation that is this short, or not that many times as long as copying the state, is waited for.
_SHORT_SECONDS = 1.0
_MANY_COPIES = 20


@dataclass(slots=True, kw_only=True)
class Boundary:
    """Acts where the state is whole, and looks on at the loops over batches.

    Inside an evaluation the state is not whole: what the script has counted so far would be lost. A stop
    is obeyed there all the same if the state from before it is kept: in a checkpoint, or in a copy that is
    made as training's own loop ends, before an evaluation that may be long. `copies` says whether to.
    """

    state: WholeState
    saves: Saves
    ending: Ending
    requests: Requests
    rehearsal: Rehearsal
    unkept: UnkeptWatch
    recovery: Recovery
    pulse: Pulse
    best_of: Collection[str]
    copies: bool
    group: Group
    is_best_due: bool = False
    _is_due: bool = False
    _blocks_without_saves: int = 0
    # Whether going on from what is kept leads to here again, with no step lost.
    _is_kept: bool = True
    _copy_seconds: float = 0.0
    _evaluates_since: float | None = None
    _longest_evaluation: float | None = None

    def when_whole(self) -> None:
        """Act on what is due now, or when the loop over batches has done all of its body."""
        if self.state.position.is_in_pass or self._blocks_without_saves:
            self._is_due = True
        else:
            self._act()
            # What follows in the script is not done again by a run that goes on from here.
            self._is_kept = False

    def when_asked(self) -> None:
        """Act on what the script asks for; several ranks do so after the next step, where all come by."""
        if self.group.is_alone:
            self.when_whole()

    def step(self) -> None:
        """Note that a step is complete."""
        self.state.position.note_counted(self.state.step)
        self._is_kept = False
        if self._evaluates_since is not None:
            lasted = time.monotonic() - self._evaluates_since
            self._longest_evaluation = max(lasted, self._longest_evaluation or 0.0)
            self._evaluates_since = None

    def record(self, metrics: Collection[str]) -> None:
        """Note that metrics of the state of now were recorded."""
        self.is_best_due = self.is_best_due or any(name in metrics for name in self.best_of)
        if not self.state.position.is_in_pass:
            self.pulse.beat("evaluating")
        elif self.group.is_alone:
            self._is_due = True

    def begin_epoch(self, epoch: int, count: int) -> None:
        """Enter the body of `epoch`; a request to stop that came before the first is obeyed."""
        if self._is_kept:
            self._leave_if_asked()
        is_resumed = self.state.position.inside_epoch and epoch == self.state.position.epoch
        self.pulse.begin_epoch(epoch, count, is_resumed=is_resumed)
        self.state.position.begin_epoch(epoch)

    def end_epoch(self) -> None:
        """Act on what is due at the end of an epoch."""
        self._is_kept = self._act(where="at the end of an epoch, after step")

    @contextmanager
    def without_saves(self) -> Iterator[None]:
        """Save nothing inside this block; what becomes due is done after it."""
        self._blocks_without_saves += 1
        try:
            yield
        finally:
            self._blocks_without_saves -= 1
        if self._is_due:
            self.when_whole()

    def before_batch(self, found: Pass) -> None:
        is_free = not found.is_inner and not self._blocks_without_saves
        if not self.group.is_alone:
            # Where all ranks come by: one of them alone may evaluate.
            is_free = is_free and bool(found.steps)
        if self.copies and self.recovery.wants_first(found):
            self._is_due = self.saves.wanted = True
        # Inside a step it waits for the step: nobody but the script knows how far that is.
        if self._is_due and is_free and not self.state.position.is_inside_step():
            self._is_kept = self._act(found)
        elif self._is_kept:
            self._leave_if_asked()

    def got_batch(self, found: Pass, waited_seconds: float) -> None:
        if not found.is_inner:
            self.state.position.note_batch(found)
        self.pulse.batch(found, waited_seconds, trains=self.state.position.trains(found))

    def read_past(self, found: Pass) -> None:
        if self._is_kept:
            self._leave_if_asked()
        self.pulse.batch(found, 0.0, trains=self.state.position.trains(found))

    def complete(self) -> None:
        """End the run with what the loop ended with, unless the last step was found to be bad."""
        try:
            self.recovery.act(None)
        except BaseException as error:
            if not isinstance(error, StopRequested):
                self.ending.fail(error)
            raise
        self.ending.complete()

    def left_out(self, found: Pass, first: int, samples: list[Any]) -> None:
        self.recovery.say_left_out(found, first, samples)

    def got_last(self, found: Pass) -> None:
        if found.is_inner:
            return
        # Also of a pass without a step, which a run that was resumed at its end makes.
        self.pulse.beat("evaluating")
        if not found.steps:
            return
        self._evaluates_since = time.monotonic()
        if self._is_kept or not self._is_worth_a_copy() or self.state.position.is_inside_step():
            return
        self._is_kept = self.saves.copy()
        self._copy_seconds = time.monotonic() - self._evaluates_since

    def _is_worth_a_copy(self) -> bool:
        if not self.copies or self._blocks_without_saves:
            return False
        # The first one may be of any length.
        longest = self._longest_evaluation
        return longest is None or longest > max(_SHORT_SECONDS, _MANY_COPIES * self._copy_seconds)

    def _agree(self, requests: AgreedRequests, where: Where) -> None:
        """Take over what all ranks want; each gets to know all of it here, and nowhere else."""
        wants_save = self.saves.is_due(*self.state.progress()) or self.is_best_due
        self.saves.wanted, has_failed = requests.agree(
            where, self.state.step, wants_save=wants_save, has_failed=self.saves.has_failed
        )
        if has_failed:
            self.group.decided(self.saves.raise_failure)

    def _leave_if_asked(self) -> None:
        reason = self.requests.stop_reason()
        if reason is not None:
            self.unkept.tell()
            self.ending.leave(reason)

    def _act(self, found: Pass | None = None, where: Where = "outside of a loop, after step") -> bool:
        """Act on what is due, where the state is whole; True if this state is saved now.

        `found` is the pass whose loop asks for a batch, None elsewhere.
        """
        self._is_due = False
        self.rehearsal.at_boundary()
        if isinstance(self.requests, AgreedRequests):
            self._agree(self.requests, "before the next batch, after step" if found is not None else where)
        else:
            self.saves.raise_failure()
        if self.recovery.act(found):
            self.is_best_due, self._evaluates_since = False, None
            # Nothing is to be saved: this state is that of a checkpoint.
            self._leave_if_asked()
            return True
        reason = self.requests.stop_reason()
        if reason is not None:
            self.unkept.tell()
            self.ending.stop(reason)
        is_of_this_state = self.state.position.is_in_pass or not self.state.position.inside_epoch
        if self.recovery.has_got_past():
            self.saves.wanted = True
        if self.requests.take_save() or (self.is_best_due and is_of_this_state):
            self.saves.wanted = True
        is_saved = self.saves.take_if_due(*self.state.progress())
        if is_saved:
            self.is_best_due = False
        self.rehearsal.past_boundary()
        return is_saved
