"""What comes after an attempt: a pure decision from the history of verdicts.

The rules, in their order:

1.  What cannot be ended holds the run: no second copy may start beside it.
2.  Completed is done; a script that failed after its training gives the run its exit code, and no
    restart. After a request to stop, whatever else happened, it is stopped.
3.  What said that a restart cannot help, or could not be started, is held. A program that is missing
    since the run last worked is on a disk that is away, and counts as such.
4.  More than `max_starts_per_hour` starts in an hour, for any reason, or more than `max_restarts`
    in all: held.
    Before all that follows: where memory ran out and the script can split its batches, it is started
    again at once with smaller parts, down to single samples.
5.  State saved without our asking ("run me again", a preemption), or a machine that was started
    again: restarted at once, free of charge. `max_free_stops` times in a row without a newer
    checkpoint: handed over to whatever started us, or held where it is the machine that restarts,
    since starting it again here leads nowhere. A run that stopped to go back to an earlier checkpoint
    is rolled back in the same way, and then held: elsewhere it would do the same. Such roll-backs count
    until there is a checkpoint newer than all before.
6.  A plain exception while nothing in this run ever worked (no checkpoint, no step) is a typo, a
    missing module or a wrong path: held after the first time. Not so where something ran out or the
    outside world was behind it, which gets the ordinary treatment. A command without our library
    reports no steps; if it lived for `startup_seconds` it counts as having worked.
7.  `max_without_step` failures before a first step, of a run that reports its steps: held.
8.  The same fingerprint in a row without a newer checkpoint, and no step farther than before: held.
    For exceptions, hangs and want of memory the second time; the third time for signals, a silent
    end, devices and connections between ranks, which may be by chance. Where numbers were not finite
    the checkpoint itself may be to blame: it is rolled back to the one before, if there is one, and so
    again, each time farther, `max_rollbacks` times without a checkpoint newer than all before.
9.  Too many failures without a newer checkpoint: held. Those of the network and of disks, which
    others have to mend, have a budget of their own (`max_infrastructure_failures`) and no rule 8;
    so have those of devices and connections between ranks. All others share `max_failures`.
10. Else restarted, after a pause that doubles with each failure in a row.

Only a newer verified checkpoint makes failures forgotten; a start that succeeds proves nothing. After a
roll-back it is to be newer than the one that the run went back to: the others are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from unbroken.errors import EXIT_DO_NOT_RESTART, EXIT_RUN_ME_AGAIN, UnhealthyError
from unbroken.rundir.last_words import ROLL_BACK
from unbroken.supervisor.judging.verdict import Cause, Verdict
from unbroken.supervisor.progress import is_newer

Action: TypeAlias = Literal["restart", "roll-back", "hold", "done", "stopped", "hand-over"]

EXIT_TERMINATED = 143
_HOUR_SECONDS = 3600.0
_FINAL = ("refused", "not-started", "unkillable")
# Whoever mends these needs time, and it is no fault of the run.
_PATIENT: frozenset[Cause] = frozenset({"disk-full", "network", "storage"})
_BY_CHANCE: frozenset[Cause] = frozenset({"collective", "device"})
_INFRASTRUCTURE = _PATIENT | _BY_CHANCE
_MEMORY: frozenset[Cause] = frozenset({"device-memory", "memory", "shared-memory"})
_FREE: frozenset[Cause] = frozenset({"preemption", "reboot"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits. The first pause is `base_seconds`, none is longer than `cap_seconds`."""

    base_seconds: float = 1.0
    cap_seconds: float = 600.0
    max_failures: int = 5
    max_infrastructure_failures: int = 20
    max_starts_per_hour: int = 20
    max_restarts: int | None = None
    max_free_stops: int = 3
    max_same_exception: int = 2
    max_same_signal: int = 3
    max_without_step: int = 2
    max_rollbacks: int = 3
    startup_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt that ended. `checkpoint` is the newest verified one of the run after it.

    `started_seconds` is of a clock that never goes back. `has_words` tells that our library ran in
    it, `made_step` that it completed a step; `step` is its last, None if that is not known. `parts` is
    set if memory ran out and the next attempt will split its batches into that many parts, more than
    this one did. `went_back` tells that the run was rolled back in it, or after it, so that `checkpoint`
    may be older than those before; `rolled_back`, that the supervisor decided that.
    """

    verdict: Verdict
    started_seconds: float
    lived_seconds: float
    has_words: bool
    made_step: bool
    checkpoint: str | None
    step: int | None = None
    parts: int | None = None
    went_back: bool = False
    rolled_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why. `exit_code` is what the whole run ends with; None if it `goes_on`.

    `hint` is what the last attempt, or the error in its way, says to do next. `back_to` is the checkpoint
    of a roll-back that is not decided in the run already.
    """

    action: Action
    reason: str
    delay_seconds: float = 0.0
    exit_code: int | None = None
    hint: str = ""
    back_to: str | None = None

    @property
    def goes_on(self) -> bool:
        """True if there is to be another attempt."""
        return self.action in ("restart", "roll-back")


def decide(
    history: Sequence[Ended],
    policy: RestartPolicy,
    *,
    first_checkpoint: str | None,
    is_stop_asked: bool,
    now_seconds: float,
    random: float,
    older: str | None = None,
) -> Decision:
    """Return what follows the last attempt of `history`, which is not empty.

    `first_checkpoint` is the newest one from before the first attempt; `random`, from 0 to 1, spreads
    the pause between half and all of its length, so that runs that failed together do not return together.
    `older` is the good checkpoint before the one that a restart goes on from; it is asked for only where
    `may_roll_back`.
    """
    history = [_with_missing_program(ended, history) for ended in history]
    last = history[-1].verdict
    streak, longer = _since_progress(history, first_checkpoint), _since_newest(history, first_checkpoint)
    decision = (
        _end(last, is_stop_asked)
        or _over_budget(history, policy, now_seconds)
        or _smaller_parts(history[-1])
        or _after_free_stop(streak, longer, policy)
        or _never_worked(history, policy)
        or _without_step(history, policy)
        or _roll_back(streak, longer, policy, older)
        or _repeats(streak, longer, policy)
        or _spent(streak, policy)
        or _restart(streak, policy, random)
    )
    return replace(decision, hint=last.hint)


def may_roll_back(history: Sequence[Ended], policy: RestartPolicy, *, first_checkpoint: str | None) -> bool:
    """Tell whether what `decide` says next may depend on there being an older checkpoint."""
    streak, longer = _since_progress(history, first_checkpoint), _since_newest(history, first_checkpoint)
    return _is_poisoned(streak, longer, policy)


def stopped_between_attempts() -> Decision:
    """Return the decision for a request to stop that came while no attempt was running."""
    return Decision(
        action="stopped", reason="asked to stop between two attempts", exit_code=EXIT_RUN_ME_AGAIN
    )


def hold(reason: str, *, hint: str = "") -> Decision:
    """Return the decision to leave the rest to a human."""
    return Decision(action="hold", reason=reason, exit_code=EXIT_DO_NOT_RESTART, hint=hint)


def _end(last: Verdict, is_stop_asked: bool) -> Decision | None:
    why = "; ".join(last.evidence)
    if last.outcome == "unkillable":
        return hold(f"nothing is started beside what is left: {why}")
    if last.outcome == "completed":
        return Decision(action="done", reason=why, exit_code=last.exit_code)
    if is_stop_asked:
        code = EXIT_RUN_ME_AGAIN if last.is_saved else EXIT_TERMINATED
        return Decision(action="stopped", reason=why, exit_code=code)
    if last.outcome in _FINAL:
        is_unhealthy = last.kind == UnhealthyError.kind and last.message
        return hold(last.message if is_unhealthy else "a restart would end the same way")
    return None


def _with_missing_program(ended: Ended, history: Sequence[Ended]) -> Ended:
    """Return `ended`; as a failure of storage if its program, started before, was not found."""
    verdict = ended.verdict
    was_there = any(other.verdict.outcome != "not-started" for other in history)
    if not was_there or verdict.outcome != "not-started" or verdict.kind != FileNotFoundError.__name__:
        return ended
    hint = "its program was there before: see whether the disk or environment that holds it is"
    return replace(ended, verdict=replace(verdict, outcome="failed", cause="storage", hint=hint))


def _over_budget(history: Sequence[Ended], policy: RestartPolicy, now_seconds: float) -> Decision | None:
    starts = sum(now_seconds - ended.started_seconds < _HOUR_SECONDS for ended in history)
    if starts >= policy.max_starts_per_hour:
        return hold(f"{starts} starts within an hour")
    if policy.max_restarts is not None and len(history) > policy.max_restarts:
        return hold(f"restarted {len(history) - 1} times, and no more was allowed")
    return None


def _smaller_parts(last: Ended) -> Decision | None:
    # What follows is not the same again, also where nothing has worked yet; one sample is the end of it.
    if last.parts is None:
        return None
    return Decision(
        action="restart", reason=f"memory ran out; now each batch is computed in {last.parts} parts"
    )


def _after_free_stop(
    streak: Sequence[Ended], longer: Sequence[Ended], policy: RestartPolicy
) -> Decision | None:
    last = streak[-1].verdict
    if not _is_free(last):
        return None
    row = _equal_at_end([_is_free(ended.verdict) for ended in streak])
    is_machine = last.cause == "reboot"
    if row > policy.max_free_stops and is_machine:
        return hold(f"this machine was started again {row} times in a row without a newer checkpoint")
    if last.kind == ROLL_BACK:
        own = sum(ended.verdict.kind == ROLL_BACK for ended in longer)
        return _after_own_roll_back(last, max(row, own), policy)
    if row > policy.max_free_stops:
        return Decision(
            action="hand-over",
            reason=f"it stopped by itself {row} times in a row without a newer checkpoint",
            exit_code=EXIT_RUN_ME_AGAIN,
        )
    if is_machine:
        return Decision(action="restart", reason="the machine was started again, no fault of the run")
    return Decision(action="restart", reason="its state is saved, and nobody asked it to stop")


def _after_own_roll_back(last: Verdict, row: int, policy: RestartPolicy) -> Decision:
    if row > policy.max_free_stops:
        return hold(f"rolled back or stopped {row} times in a row without a newer checkpoint: {last.message}")
    return Decision(action="roll-back", reason=last.message)


def _never_worked(history: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    last = history[-1].verdict
    is_exception = last.outcome == "failed" and last.confidence != "unknown"
    if not is_exception or last.cause in _INFRASTRUCTURE | _MEMORY:
        return None
    if any(_has_worked(ended, policy) for ended in history):
        return None
    return hold("it failed before its first step, and would again")


def _without_step(history: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    last = history[-1]
    # Without our library nobody knows of steps; the ordinary limits must do.
    if not last.has_words or last.verdict.cause in _PATIENT:
        return None
    if any(_has_worked(ended, policy) for ended in history):
        return None
    failures = _failures(history)
    if failures < policy.max_without_step:
        return None
    return hold(f"it ended {failures} times before its first step")


def _has_worked(ended: Ended, policy: RestartPolicy) -> bool:
    lived_long = not ended.has_words and ended.lived_seconds >= policy.startup_seconds
    return ended.checkpoint is not None or ended.made_step or lived_long


def _roll_back(
    streak: Sequence[Ended], longer: Sequence[Ended], policy: RestartPolicy, older: str | None
) -> Decision | None:
    if older is None or not _is_poisoned(streak, longer, policy):
        return None
    last = streak[-1]
    where = f", at step {last.step}" if last.step is not None else ""
    what = f"{last.verdict.message or last.verdict.kind}, {_same_at_end(streak)} times in a row{where}"
    return Decision(action="roll-back", reason=f"rolled back to {older}: {what}", back_to=older)


def _is_poisoned(streak: Sequence[Ended], longer: Sequence[Ended], policy: RestartPolicy) -> bool:
    """Tell whether what the attempts go on from may be what makes their numbers not finite."""
    last = streak[-1].verdict
    is_again = last.cause == "not-finite" and _same_at_end(streak) >= _same_limit(last, policy)
    return is_again and last.outcome == "failed" and _rollbacks(longer) < policy.max_rollbacks


def _rollbacks(longer: Sequence[Ended]) -> int:
    return sum(ended.rolled_back for ended in longer[:-1])


def _repeats(streak: Sequence[Ended], longer: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    last = streak[-1]
    if last.verdict.cause in _PATIENT:
        return None
    same = _same_at_end(streak)
    if same < _same_limit(last.verdict, policy):
        return None
    where = f" at step {last.step}" if last.step is not None else ""
    cause = f" ({last.verdict.cause})" if last.verdict.cause else ""
    back = f", rolled back {_rollbacks(longer)} times" if _rollbacks(longer) else ""
    return hold(f"it ended the same way {same} times in a row{where} without a newer checkpoint{cause}{back}")


def _same_limit(verdict: Verdict, policy: RestartPolicy) -> int:
    if verdict.cause in _BY_CHANCE:
        return policy.max_same_signal
    is_surely_again = verdict.outcome in ("failed", "hung") or verdict.cause in _MEMORY
    return policy.max_same_exception if is_surely_again else policy.max_same_signal


def _same_at_end(streak: Sequence[Ended]) -> int:
    """Return how many of the last attempts ended alike, since one got farther than those before it."""
    row = _equal_at_end([ended.verdict.fingerprint for ended in streak])
    count, farthest = 0, None
    for ended in streak[len(streak) - row :]:
        is_farther = ended.step is not None and farthest is not None and ended.step > farthest
        count = 1 if is_farther else count + 1
        farthest = ended.step if farthest is None or is_farther else farthest
    return count


def _spent(streak: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    failures, allowed = _budget(streak, policy)
    return hold(f"{failures} failures without a newer checkpoint") if failures > allowed else None


def _budget(streak: Sequence[Ended], policy: RestartPolicy) -> tuple[int, int]:
    """Return how many failures of the last one's kind there were, and how many are allowed."""
    is_infrastructure = streak[-1].verdict.cause in _INFRASTRUCTURE
    alike = [ended for ended in streak if (ended.verdict.cause in _INFRASTRUCTURE) == is_infrastructure]
    allowed = policy.max_infrastructure_failures if is_infrastructure else policy.max_failures
    return _failures(alike), allowed


def _restart(streak: Sequence[Ended], policy: RestartPolicy, random: float) -> Decision:
    # The exponent is bounded: a large enough one is no float any more.
    pause = min(policy.cap_seconds, policy.base_seconds * 2.0 ** min(_failures(streak) - 1, 60))
    failures, allowed = _budget(streak, policy)
    return Decision(
        action="restart",
        reason=f"failure {failures} of {allowed} allowed without a newer checkpoint",
        delay_seconds=pause * (0.5 + random / 2),
    )


def _since_progress(history: Sequence[Ended], first_checkpoint: str | None) -> Sequence[Ended]:
    """Return the attempts from the last one that left a checkpoint newer than all before it.

    After a roll-back it need only be newer than what was left then.
    """
    newest, start = first_checkpoint, 0
    for index, ended in enumerate(history):
        if is_newer(ended.checkpoint, newest):
            newest, start = ended.checkpoint, index
        elif ended.went_back:
            newest = ended.checkpoint
    return history[start:]


def _since_newest(history: Sequence[Ended], first_checkpoint: str | None) -> Sequence[Ended]:
    """Return the same, whatever the run went back to: it must not go back and forth for ever."""
    return _since_progress([replace(ended, went_back=False) for ended in history], first_checkpoint)


def _failures(streak: Sequence[Ended]) -> int:
    return sum(not _is_free(ended.verdict) for ended in streak)


def _is_free(verdict: Verdict) -> bool:
    return verdict.outcome == "stopped" or verdict.cause in _FREE


def _equal_at_end(values: Sequence[object]) -> int:
    count = 0
    while count < len(values) and values[-1 - count] == values[-1]:
        count += 1
    return count
