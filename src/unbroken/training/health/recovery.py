"""Acting on what the watch over training has found: tell, stop, or go back and on behind the trouble."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import DamagedError, StateMismatchError, UnhealthyError
from unbroken.rundir.journal import OVER
from unbroken.rundir.latest import point_latest
from unbroken.rundir.rollbacks import Rollback, Window, add_rollback, read_rollbacks
from unbroken.rundir.tell import tell
from unbroken.state.choices import Choices
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.health.evidence import with_evidence
from unbroken.training.health.findings import Finding
from unbroken.training.health.going_back import GoBack, Kept, Refusal, decide, end_of_place
from unbroken.training.health.leaving import leave_to_go_back, say_gone_back
from unbroken.training.health.lowering import Lowering
from unbroken.training.health.replaying import Replaying
from unbroken.training.health.watch import HealthWatch
from unbroken.training.leaving_out import windows_of
from unbroken.training.passes import Pass
from unbroken.training.preemption import StopRequested
from unbroken.training.ranks.following import wait_on_all
from unbroken.training.resume import Restoring
from unbroken.training.saver import Saver
from unbroken.training.saves import Saves, without_collecting
from unbroken.training.whole_state import WholeState

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Acts at boundaries, before anything is saved.

    `choices` are what the script has said about restores; `beat(phase)` shows them in the heartbeat.
    """

    watch: HealthWatch
    attempt: Attempt
    state: WholeState
    saver: Saver
    saves: Saves
    full_disk: FullDisk
    choices: Choices
    beat: Callable[[str], None]
    replaying: Replaying
    lowering: Lowering
    # The last step that is still at the place that the run went back for, until it is past that.
    _end_of_place: int | None = None
    # The step that this attempt began at: one that began from another library's state is not at 0.
    _begins_at: int = 0

    def begin(self) -> None:
        """Do what the roll-backs of the run ask for from here on; training is about to begin."""
        self._begins_at = self.state.step
        self._follow(read_rollbacks(self.attempt.run_directory))

    def close(self) -> None:
        """Leave the optimizers as the script made them."""
        self.lowering.close()

    def wants_first(self, found: Pass) -> bool:
        """Tell whether the state before the first step is to be saved now, so that one can go back to it."""
        is_first = not (self.state.step - self._begins_at or found.delivered or found.is_inner)
        return (
            is_first
            and self.watch.policy.rolls_back
            and not (self.saver.newest_name or self.saver.is_writing)
        )

    def has_got_past(self) -> bool:
        """Tell, once, that training is past the place it went back for: a state worth to be kept."""
        self.lowering.refresh()
        if self._end_of_place is None or self.state.step <= self._end_of_place:
            return False
        self._end_of_place = None
        return True

    def act(self, found: Pass | None) -> bool:
        """Act on what the watch has found; True if training now stands at a checkpoint again.

        `found` is the pass whose loop asks for a batch, None outside such a loop.

        Raises:
            UnhealthyError: the run is to stop, or going back has not helped often enough.
            StopRequested: the next start goes back.
        """
        while (bare := self.watch.take()) is not None:
            finding = with_evidence(bare, self.state, found)
            if finding.action == "roll-back":
                return self._go_back(finding, found)
            if finding.action == "stop":
                self._stop(finding)
            if finding.action == "warn":
                self._alarm(OVER if finding.is_over else finding.kind, finding.text, finding.hint)
        return False

    def say_left_out(self, found: Pass, first: int, samples: list[Any]) -> None:
        """Put on record which batches were left out just now."""
        assert found.place is not None, "only passes with a place leave batches out"
        epoch, index = found.place
        fields = {"epoch": epoch, "pass_index": index, "first": first, "last": first + len(samples) - 1}
        known = None if None in samples else samples
        self._log("skipped", step=self.state.step, **fields, samples=known)

    def _stop(self, finding: Finding) -> NoReturn:
        self.saves.save(*self.state.progress())
        wait_on_all(self.state.group, self.saver)
        raise UnhealthyError(
            f"{finding.text}; the state is saved in {self.saver.newest_name}",
            hint=finding.hint or "look for the cause, then start the run again: it goes on from there",
        )

    def _go_back(self, finding: Finding, found: Pass | None) -> bool:
        self.beat("restoring")
        group = self.state.group
        decision = group.decided(lambda: self._decide(finding, found))
        if not group.is_alone:
            # All of them from the same checkpoint, at the next start.
            self._leave(decision)
        directory = self.attempt.run_directory
        store, rollbacks = CheckpointStore(directory), read_rollbacks(directory)
        restoring = self._restoring(rollbacks, found)
        checkpoint = self._restored_here(finding, store, decision, rollbacks, restoring, found)
        if checkpoint is None:
            self._leave(decision)
        self._settle(store, restoring, decision.rollback, checkpoint)
        self._follow(rollbacks)
        self.beat("training")
        return True

    def _decide(self, finding: Finding, found: Pass | None) -> GoBack:
        """Decide to go back and put it on record, or raise UnhealthyError."""
        # What is being written may be what one goes back to, or tainted like the rest.
        self.saver.wait()
        directory = self.attempt.run_directory
        store, earlier = CheckpointStore(directory), read_rollbacks(directory)
        decision = decide(
            finding,
            rollbacks=earlier,
            kept=list(_kept(store, self._restoring(earlier, found))),
            windows=self.state.position.consumption.windows,
            policy=self.watch.policy,
            attempt=self.attempt.number,
        )
        if isinstance(decision, GoBack):
            rollback = replace(decision.rollback, ranks=self.state.group.size)
            # From here on it is decided: whoever dies after this goes back at the next start.
            self._surely(lambda: add_rollback(directory, rollback), "the roll-back")
        # What was copied since belongs to the trouble.
        self.saver.forget_copies()
        if isinstance(decision, Refusal):
            raise UnhealthyError(f"{finding.text}; {decision.reason}", hint=decision.hint)
        return decision

    def _follow(self, rollbacks: tuple[Rollback, ...]) -> None:
        self.lowering.follow(rollbacks)
        self._end_of_place = None
        if rollbacks and self.watch.policy.rolls_back:
            end = end_of_place(rollbacks[-1])
            self._end_of_place = end if self.saver.newest_step <= end else None

    def _surely(self, act: Callable[[], _T], what: str) -> _T:
        return self.full_disk.write_surely(act, what)

    def _restoring(self, rollbacks: tuple[Rollback, ...], found: Pass | None) -> Restoring:
        def act(checkpoint: Checkpoint) -> Any:
            assert found is not None, "there is no pass to go back in"
            with without_collecting():
                return self.state.go_back(found, checkpoint)

        return Restoring(self.attempt.directory, act, self.choices.non_finite, rollbacks)

    def _restored_here(
        self,
        finding: Finding,
        store: CheckpointStore,
        decision: GoBack,
        rollbacks: tuple[Rollback, ...],
        restoring: Restoring,
        found: Pass | None,
    ) -> Checkpoint | None:
        """Go back in this process and return the checkpoint, or None where that takes another process."""
        is_main = threading.current_thread() is threading.main_thread()
        if found is None or not is_main or not _restores_all(self.choices):
            return None
        self.state.rollbacks = len(rollbacks)
        self.state.position.windows = windows_of(rollbacks)
        for name in decision.targets:
            try:
                checkpoint = store.get(name)
                if not self.state.lies_in(found, checkpoint):
                    return None
                self._replay(finding, checkpoint, found, restoring, windows_of(rollbacks[:-1]))
                self._surely(partial(restoring.do, checkpoint), "the record of a restore")
                return checkpoint
            except DamagedError as error:
                place = self._surely(partial(store.quarantine, name, error.message), name)
                tell(f"{name} was passed over: {error.message}; now in {place}")
            except StateMismatchError as error:
                # Objects that training has changed in kind; those that the script builds anew will fit.
                tell(f"cannot go back in this process: {error.message}")
                return None
        return None

    def _replay(
        self,
        finding: Finding,
        checkpoint: Checkpoint,
        found: Pass,
        restoring: Restoring,
        windows: Sequence[Window],
    ) -> None:
        """Do the bad step again from `checkpoint`, if that is asked for; `windows` were left out before."""
        if self.replaying.wants(finding, checkpoint, found):
            restoring.do(checkpoint)
            batches = found.slot.batches
            assert batches is not None, "a pass that goes on has batches"
            self.replaying.of(finding, checkpoint, found.again(windows), lambda: batches.samples(1))

    def _settle(
        self, store: CheckpointStore, restoring: Restoring, rollback: Rollback, checkpoint: Checkpoint
    ) -> None:
        """Set aside what was given up, and go on from `checkpoint`."""
        names = store.names()
        later = names[names.index(checkpoint.name) + 1 :]
        for name in later:
            reason = _reason(store, restoring, name, checkpoint.name)
            self._surely(partial(store.quarantine, name, reason), f"the reason to set {name} aside")
        self.state.went_on_from.append(checkpoint.step)
        self.saver.begin_from(checkpoint)
        point_latest(self.attempt.run_directory, checkpoint.name)
        self.saves.taken(*self.state.progress())
        say_gone_back(
            rollback,
            checkpoint.name,
            checkpoint.step,
            tainted=later,
            in_process=True,
            attempt=self.attempt,
            full_disk=self.full_disk,
        )

    def _leave(self, decision: GoBack) -> NoReturn:
        """End this process, so that the next one goes back."""
        names = CheckpointStore(self.attempt.run_directory).names()
        # Some may have turned out to be damaged.
        target = next((name for name in decision.targets if name in names), None)
        try:
            leave_to_go_back(
                decision.rollback, target, attempt=self.attempt, saver=self.saver, full_disk=self.full_disk
            )
        except StopRequested:
            # No rank is gone before the first one has said why: whoever started them would end it.
            self.state.group.told(None)
            raise

    def _alarm(self, what: str, text: str, hint: str) -> None:
        self.full_disk.write(lambda: self.attempt.alarm(what, text, hint), "an alarm")

    def _log(self, kind: str, **fields: Any) -> None:
        self.full_disk.write(lambda: self.attempt.journal.append(kind, **fields), "the journal")


def _kept(store: CheckpointStore, restoring: Restoring) -> Iterator[Kept]:
    for name in store.names():
        try:
            checkpoint = store.get(name)
        except DamagedError:
            # Whoever looks for one to go on from sets it aside.
            continue
        yield Kept(
            name=name,
            step=checkpoint.step,
            earlier=checkpoint.manifest.rollbacks,
            against=restoring.reason_against(checkpoint),
            is_finite=not restoring.blown_up(checkpoint),
        )


def _reason(store: CheckpointStore, restoring: Restoring, name: str, target: str) -> str:
    try:
        found = restoring.reason_against(store.get(name))
    except DamagedError as error:
        found = error.message
    return found or f"set aside: the run went back to {target}"


def _restores_all(choices: Choices) -> bool:
    """Tell whether a restore depends on the checkpoint alone, not on what the script has built."""
    told = (choices.rename, choices.allow, choices.fresh, choices.cast, choices.override, choices.horizon)
    return not any(told)
