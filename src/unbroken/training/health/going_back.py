"""How far back a run goes, and what it leaves out then. Pure: facts in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unbroken.rundir.rollbacks import LowerRate, Rollback, Window
from unbroken.training.health.findings import Finding
from unbroken.training.health.policy import Health

# A run that gets past each place and meets the next at once is lost, too: in so many steps it goes back at
# most so many times as often as in a row.
_LATE_STEPS = 1000
_TIMES_OF_LATE = 4
# Going back once more for one place leaves out at most so many steps more on each side.
MOST_STEPS_MORE = 16


class BatchesOf(Protocol):
    """Gives the batches of the steps from the first to the last, and of so many more."""

    def __call__(self, first_step: int, last_step: int, *, more: int) -> tuple[Window, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint: its step, how many roll-backs came before it, and what is known against it, if anything.

    It is not finite if it holds NaN or infinity where none belongs.
    """

    name: str
    step: int
    earlier: int
    against: str | None = None
    is_finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The roll-back, and the checkpoints that one can go back to then, newest first; none: begin anew."""

    rollback: Rollback
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the run is not rolled back, and what people may do."""

    reason: str
    hint: str


def decide(
    finding: Finding,
    *,
    rollbacks: Sequence[Rollback],
    kept: Sequence[Kept],
    windows: BatchesOf,
    policy: Health,
    attempt: int,
) -> GoBack | Refusal:
    """Return what is done about a finding that the run is to be rolled back for.

    `kept` are the checkpoints, oldest first, and `windows` gives the batches that went into steps. Going back
    once more for the same place goes farther, where there is an older checkpoint, and leaves out more on both
    sides: once as many steps as the bad ones are, then three times, seven times, up to `MOST_STEPS_MORE`.
    """
    in_a_row = rollbacks_in_a_row(finding, rollbacks)
    if (refusal := _spent(finding, in_a_row, rollbacks, policy)) is not None:
        return refusal
    targets = [one for one in kept if one.against is None and one.step <= finding.trusted_step]
    farther = _farther(targets, earlier=len(rollbacks)) if in_a_row else []
    targets = farther or targets
    if not targets and kept:
        return _too_late(finding, kept)
    target_step = targets[-1].step if targets else 0
    first, last = _bad_steps(finding, kept, target_step)
    trusted_step = target_step if farther or not targets else min(finding.trusted_step, first - 1)
    more = min((last - first + 1) * (2**in_a_row - 1), MOST_STEPS_MORE)
    begin = max(1, first - more)
    left_out = windows(begin, last, more=more)
    rollback = Rollback(
        decided_by="health",
        reason=finding.text + _left_out_before(left_out, rollbacks),
        attempt=attempt,
        found_step=finding.step,
        trusted_step=trusted_step,
        windows=left_out,
        lower_rate=_lower_rate(policy, target_step),
        in_a_row=in_a_row + 1,
        left_out_steps=last + more + 1 - begin if left_out else 0,
    )
    return GoBack(rollback=rollback, targets=tuple(one.name for one in reversed(targets)))


def rollbacks_in_a_row(finding: Finding, rollbacks: Sequence[Rollback]) -> int:
    """Return how often the run went back for one place already, that of the finding."""
    if not rollbacks or finding.first_step > end_of_place(rollbacks[-1]):
        return 0
    return rollbacks[-1].in_a_row


def end_of_place(rollback: Rollback) -> int:
    """Return the last step at which trouble still counts as that of the roll-back.

    That is as many steps behind the one in which it was found as steps are left out.
    """
    return rollback.found_step + rollback.left_out_steps


def _bad_steps(finding: Finding, kept: Sequence[Kept], target_step: int) -> tuple[int, int]:
    """Return the first and the last step whose batches are left out.

    Where a state is known that was not finite before any loss showed it, the step that led to it is the bad
    one; what follows is bad for its sake.
    """
    unshown = [one for one in kept if target_step < one.step <= finding.trusted_step]
    spoilt = [one.step for one in unshown if not one.is_finite]
    if finding.kind == "non-finite" and spoilt:
        return spoilt[0], spoilt[0]
    return finding.first_step, finding.step


def _lower_rate(policy: Health, target_step: int) -> LowerRate | None:
    if policy.rate_factor == 1 or not policy.rate_steps:
        return None
    until_step = target_step + policy.rate_steps
    return LowerRate(factor=policy.rate_factor, from_step=target_step, until_step=until_step)


def _farther(fit: Sequence[Kept], *, earlier: int) -> list[Kept]:
    """Return those that are older than the one that the run went back to last."""
    before = [one for one in fit if one.earlier < earlier]
    return [one for one in before if one.step < before[-1].step]


def _left_out_before(windows: Sequence[Window], rollbacks: Sequence[Rollback]) -> str:
    """Return in words in how many epochs such batches were left out already: nobody trains on them."""
    epochs = {
        old.epoch
        for rollback in rollbacks
        for old in rollback.windows
        for new in windows
        if old.epoch < new.epoch
        and old.pass_index == new.pass_index
        and old.first <= new.last
        and new.first <= old.last
    }
    if not epochs:
        return ""
    before = "1 epoch" if len(epochs) == 1 else f"{len(epochs)} epochs"
    return f"; batches at this place were left out in {before} before this one, too"


def _spent(finding: Finding, in_a_row: int, rollbacks: Sequence[Rollback], policy: Health) -> Refusal | None:
    most = policy.max_rollbacks
    if not most:
        return Refusal(
            "it may not be rolled back (max_rollbacks=0)", "look at the batches of these steps, or allow it"
        )
    hint = "look at the data and the learning rate; to go on all the same, raise max_rollbacks of Health"
    if in_a_row >= most:
        steps = ", ".join(f"{one.found_step}" for one in rollbacks[-in_a_row:])
        times = f"rolled back {in_a_row} times in a row already (found at step {steps})"
        return Refusal(f"{times}, without getting past it", hint)
    late = [
        one for one in rollbacks if one.decided_by == "health" and one.found_step > finding.step - _LATE_STEPS
    ]
    if len(late) >= _TIMES_OF_LATE * most:
        return Refusal(f"rolled back {len(late)} times in the last {_LATE_STEPS} steps already", hint)
    return None


def _too_late(finding: Finding, kept: Sequence[Kept]) -> Refusal:
    good = [one for one in kept if one.against is None]
    older = [one for one in kept if one.step <= finding.trusted_step]
    reason = f"no good checkpoint is of step {finding.trusted_step} or before"
    reason += f", the oldest good one is {good[0].name}" if good else ", and none is good"
    hint = "keep more checkpoints, or some of long ago, such as keep=[KeepLast(3), KeepHourly(24)]"
    if older:
        reason += f"; {older[-1].name} is {older[-1].against}"
        hint = "look at what is said against it: validate= and non_finite= of Run decide what is good"
    name = (good or older or kept)[-1 if not good else 0].name
    by_hand = f"to go on from one that there is, start the script by itself with resume={name!r}"
    return Refusal(reason, f"{hint}; {by_hand}")
