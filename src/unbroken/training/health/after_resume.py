"""The first steps after a resume: are they what they were, and are the losses where they were before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import StorageError, StorageFullError
from unbroken.rundir.rollbacks import Rollback, add_rollback, read_rollbacks
from unbroken.rundir.tell import tell
from unbroken.training.attempt import Attempt
from unbroken.training.full_disk import FullDisk
from unbroken.training.health import alarmed_resumes, resumed_losses
from unbroken.training.health.certificate import certificate, difference_in_words
from unbroken.training.health.leaving import leave_to_go_back
from unbroken.training.health.policy import Health
from unbroken.training.health.repeated import Repeated, read_recorded
from unbroken.training.report import RestoreReport
from unbroken.training.saver import Saver

_MOST_ALARMED = 3
_AS_BEFORE = "they are what they were without a resume, bit for bit: it is not the resume"
_HINT_AS_BEFORE = "look at the data of these steps and the learning rate; it is told once"
_HINT = (
    "compare what is in force now with what was before: data and its order, learning rate, code, config; the "
    "restore report at the beginning of the output tells what changed"
)


def after_resume(
    report: RestoreReport,
    *,
    attempt: Attempt,
    saver: Saver,
    full_disk: FullDisk,
    policy: Health,
    non_finite: Sequence[str],
    is_alone: bool = True,
) -> AfterResume:
    """Return what watches the steps after the resume that `report` is of.

    `non_finite` are patterns of the names of tensors that may hold NaN or infinity. Raises StorageError, and
    DamagedError if it cannot be known what was rolled back.
    """
    checkpoint = saver.newest()
    assert checkpoint is not None, "a resume from no checkpoint"
    directory, manifest = attempt.run_directory, checkpoint.manifest
    since = read_rollbacks(directory)[manifest.rollbacks :]
    try:
        recorded = read_recorded(directory, before=attempt.number, step=manifest.step, rollbacks=since)
    except StorageError as error:
        # Old journals are there to prove things by, training can do without.
        tell(f"steps that are done again are not compared with those before: {error.message}")
        recorded = {}
    count = policy.resume_steps if policy.is_on else 0
    found = AfterResume(
        attempt=attempt,
        full_disk=full_disk,
        saver=saver,
        policy=policy,
        non_finite=tuple(non_finite),
        checkpoint=checkpoint,
        report=report,
        before=resumed_losses.losses_before(manifest.health, manifest.step, count, loss=policy.loss),
        repeated=Repeated(recorded, policy.loss),
        is_alone=is_alone,
        _step=manifest.step,
    )
    # Of fewer losses the mean says little, and early in training they fall fast.
    found.is_comparing = len(found.before) >= count > 0
    if not recorded:
        found.end()
    return found


@dataclass(slots=True, kw_only=True)
class AfterResume:
    """Watches the steps after a resume from `checkpoint`, until all of them that matter are done.

    `before` are the losses up to the checkpoint, `repeated` compares with what was recorded after it. With
    `is_comparing` there are losses to come that count.
    """

    attempt: Attempt
    full_disk: FullDisk
    saver: Saver
    policy: Health
    non_finite: tuple[str, ...]
    checkpoint: Checkpoint
    report: RestoreReport
    before: list[float]
    repeated: Repeated
    # Whether no other ranks, whose losses may be well, would go on from where they are.
    is_alone: bool = True
    is_comparing: bool = False
    _step: int
    _after: list[float] = field(default_factory=list)
    _repeated_losses: int = 0
    _is_certified: bool = False

    def step(self, step: int, values: Mapping[str, int | float]) -> None:
        """Take the metrics of a step; see `Run.step`. May raise StopRequested, to go back."""
        if self._is_certified and not self.is_comparing:
            return
        if step != self._step + 1:
            # The run was rolled back: what it does from there on is another thing.
            self.is_comparing = False
            self.end()
            return
        self._step = step
        is_repeated = False
        if not self._is_certified:
            is_repeated = self.repeated.step(step, values)
            if step >= self.repeated.last_step:
                self.end()
        loss = values.get(self.policy.loss)
        # Some give it in each tenth step only.
        if self.is_comparing and loss is not None:
            self._repeated_losses += is_repeated
            self._compare(loss)

    def end(self) -> None:
        """Write the certificate, if that was not done yet: nothing more is compared."""
        if self._is_certified:
            return
        self._is_certified = True
        fields = {**certificate(self.report, self.repeated), "attempt": self.attempt.number}
        try:
            self.attempt.journal.append("resume-certificate", **fields)
        except StorageError as error:
            # It is evidence: nothing that is to be kept, as the last checkpoint, may fail for want of it.
            tell(f"the certificate of the resume is lost: {error.message}")
        tell(*difference_in_words(self.report, self.repeated))
        # The run may go on for weeks.
        self.repeated.recorded = {}

    def _compare(self, loss: float) -> None:
        self._after.append(loss)
        if len(self._after) < self.policy.resume_steps:
            return
        self.is_comparing = False
        directory = self.attempt.run_directory
        if resumed_losses.is_too_high(self._after, self.before, self.policy.resume_factor):
            self._alarm()
        else:
            alarmed_resumes.forget_alarmed(directory)

    def _alarm(self) -> None:
        after, before = resumed_losses.mean(self._after), resumed_losses.mean(self.before)
        most = resumed_losses.limit(self.before, self.policy.resume_factor)
        text = (
            f"after the resume from {self.checkpoint.name} the first {len(self._after)} losses have a mean "
            f"of {after:.6g}, the last {len(self.before)} before it had {before:.6g}; {most:.6g} is the limit"
        )
        directory, number = self.attempt.run_directory, self.attempt.number
        is_repeated = self._repeated_losses == len(self._after)
        found = self.full_disk.write(
            lambda: alarmed_resumes.count_alarmed(
                directory, self.checkpoint, number, is_repeated=is_repeated
            ),
            "the record of alarmed resumes",
        )
        if found is not None and number in found.as_before:
            if found.as_before == (number,):
                self._tell(f"{text}; {_AS_BEFORE}", _HINT_AS_BEFORE)
            return
        row = 0 if found is None else len(found.attempts)
        if row < _MOST_ALARMED:
            self._tell(text, _HINT)
            return
        text = f"{text}; so it was {row} times in a row"
        if not self.policy.rolls_back or not self.is_alone:
            self._tell(text, "with health=Health() a run of one rank goes back to the checkpoint before")
            return
        self.saver.wait()
        older = alarmed_resumes.older_good(directory, self.checkpoint.step, non_finite=self.non_finite)
        if older is None:
            self._tell(f"{text}; there is no older checkpoint to go back to", _HINT)
            return
        self._go_back(older, text)

    def _go_back(self, older: Checkpoint, reason: str) -> None:
        directory = self.attempt.run_directory
        rollback = Rollback(
            decided_by="resume",
            reason=reason,
            attempt=self.attempt.number,
            found_step=self._step,
            trusted_step=older.step,
        )
        recorded = self.full_disk.write(
            lambda: add_rollback(directory, rollback), "the record of a roll-back"
        )
        if recorded is None:
            return
        alarmed_resumes.forget_alarmed(directory)
        self.end()
        leave_to_go_back(
            rollback,
            older.name,
            attempt=self.attempt,
            saver=self.saver,
            full_disk=self.full_disk,
            hint=_HINT,
        )

    def _tell(self, text: str, hint: str) -> None:
        try:
            self.attempt.alarm("resume", text, hint)
        except StorageFullError as error:
            self.full_disk.lose(error, "an alarm")
