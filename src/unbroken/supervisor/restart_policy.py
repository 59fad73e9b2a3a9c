"""What comes after an attempt: a pure decision from the history of verdicts.

The rules, in their order:

1.  What cannot be ended holds the run: no second copy may start beside it.
2.  Completed is done; a script that failed after its training gives the run its exit code, and no
    restart. After a request to stop, whatever else happened, it is stopped.
3.  What said that a restart cannot help, or could not be started, is held.
4.  More than `max_starts_per_hour` starts in an hour, for any reason, or more than `max_restarts`
    in all: held.
5.  State saved without our asking ("run me again", a preemption): restarted at once, free of
    charge. `max_free_stops` times in a row without a newer checkpoint: handed over to whatever
    started us, since starting it again here leads nowhere.
6.  A plain exception while nothing in this run ever worked (no checkpoint, no step) is a typo, a
    missing module or a wrong path: held after the first time. Not so for exceptions that name
    the outside world (`_MAY_PASS`), which get the ordinary treatment. A command without our library
    reports no steps; if it lived for `startup_seconds` it counts as having worked.
7.  The same fingerprint in a row without a newer checkpoint: held, for exceptions the second time,
    for signals and a silent end, which the outside world may cause, the third time.
8.  More than `max_failures` failures without a newer checkpoint: held.
9.  Else restarted, after a pause that doubles with each failure in a row.

Only a newer verified checkpoint makes failures forgotten; a start that succeeds proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from unbroken.errors import EXIT_DO_NOT_RESTART, EXIT_RUN_ME_AGAIN
from unbroken.supervisor.progress import is_newer
from unbroken.supervisor.verdict import Verdict

Action: TypeAlias = Literal["restart", "hold", "done", "stopped", "hand-over"]

EXIT_TERMINATED = 143
_HOUR_SECONDS = 3600.0
_FINAL = ("refused", "not-started", "unkillable")
_MAY_PASS = frozenset(
    {
        "BlockingIOError",
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "HTTPError",
        "InterruptedError",
        "OSError",
        "TimeoutError",
        "URLError",
        # Kinds of our own errors that ask for another try.
        "retryable",
        "save-failed",
        "storage",
        "storage-full",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits. The first pause is `base_seconds`, none is longer than `cap_seconds`."""

    base_seconds: float = 1.0
    cap_seconds: float = 600.0
    max_failures: int = 5
    max_starts_per_hour: int = 20
    max_restarts: int | None = None
    max_free_stops: int = 3
    max_same_exception: int = 2
    max_same_signal: int = 3
    startup_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt that ended. `checkpoint` is the newest verified one of the run after it.

    `started_seconds` is of a clock that never goes back. `has_words` tells that our library ran in
    it, `made_step` that it completed a step.
    """

    verdict: Verdict
    started_seconds: float
    lived_seconds: float
    has_words: bool
    made_step: bool
    checkpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why. `exit_code` is what the whole run ends with; None goes with "restart".

    `hint` is what the last attempt, or the error in its way, says to do next.
    """

    action: Action
    reason: str
    delay_seconds: float = 0.0
    exit_code: int | None = None
    hint: str = ""


def decide(
    history: Sequence[Ended],
    policy: RestartPolicy,
    *,
    first_checkpoint: str | None,
    is_stop_asked: bool,
    now_seconds: float,
    random: float,
) -> Decision:
    """Return what follows the last attempt of `history`, which is not empty.

    `first_checkpoint` is the newest one from before the first attempt; `random`, from 0 to 1, spreads
    the pause between half and all of its length, so that runs that failed together do not return together.
    """
    last = history[-1].verdict
    streak = _since_progress(history, first_checkpoint)
    decision = (
        _end(last, is_stop_asked)
        or _over_budget(history, policy, now_seconds)
        or _after_free_stop(streak, policy)
        or _never_worked(history, policy)
        or _repeats(streak, policy)
        or _restart(streak, policy, random)
    )
    return replace(decision, hint=last.hint)


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
        return hold("a restart would end the same way")
    return None


def _over_budget(history: Sequence[Ended], policy: RestartPolicy, now_seconds: float) -> Decision | None:
    starts = sum(now_seconds - ended.started_seconds < _HOUR_SECONDS for ended in history)
    if starts >= policy.max_starts_per_hour:
        return hold(f"{starts} starts within an hour")
    if policy.max_restarts is not None and len(history) > policy.max_restarts:
        return hold(f"restarted {len(history) - 1} times, and no more was allowed")
    return None


def _after_free_stop(streak: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    if streak[-1].verdict.outcome != "stopped":
        return None
    stops = _equal_at_end([ended.verdict.outcome for ended in streak])
    if stops > policy.max_free_stops:
        return Decision(
            action="hand-over",
            reason=f"it stopped by itself {stops} times in a row without a newer checkpoint",
            exit_code=EXIT_RUN_ME_AGAIN,
        )
    return Decision(action="restart", reason="its state is saved, and nobody asked it to stop")


def _never_worked(history: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    last = history[-1]
    is_exception = last.verdict.outcome == "failed" and last.verdict.confidence != "unknown"
    if not is_exception or last.verdict.kind.rpartition(".")[2] in _MAY_PASS:
        return None
    if any(_has_worked(ended, policy) for ended in history):
        return None
    return hold("it failed before its first step, and would again")


def _has_worked(ended: Ended, policy: RestartPolicy) -> bool:
    lived_long = not ended.has_words and ended.lived_seconds >= policy.startup_seconds
    return ended.checkpoint is not None or ended.made_step or lived_long


def _repeats(streak: Sequence[Ended], policy: RestartPolicy) -> Decision | None:
    last = streak[-1].verdict
    same = _equal_at_end([ended.verdict.fingerprint for ended in streak])
    limit = policy.max_same_exception if last.outcome == "failed" else policy.max_same_signal
    if same >= limit:
        return hold(f"it ended the same way {same} times in a row without a newer checkpoint")
    failures = _failures(streak)
    if failures > policy.max_failures:
        return hold(f"{failures} failures without a newer checkpoint")
    return None


def _restart(streak: Sequence[Ended], policy: RestartPolicy, random: float) -> Decision:
    failures = _failures(streak)
    # The exponent is bounded: a large enough one is no float any more.
    pause = min(policy.cap_seconds, policy.base_seconds * 2.0 ** min(failures - 1, 60))
    return Decision(
        action="restart",
        reason=f"failure {failures} of {policy.max_failures} allowed without a newer checkpoint",
        delay_seconds=pause * (0.5 + random / 2),
    )


def _since_progress(history: Sequence[Ended], first_checkpoint: str | None) -> Sequence[Ended]:
    """Return the attempts from the last one that left a checkpoint newer than all before it."""
    newest, start = first_checkpoint, 0
    for index, ended in enumerate(history):
        if is_newer(ended.checkpoint, newest):
            newest, start = ended.checkpoint, index
    return history[start:]


def _failures(streak: Sequence[Ended]) -> int:
    return sum(ended.verdict.outcome != "stopped" for ended in streak)


def _equal_at_end(values: Sequence[object]) -> int:
    count = 0
    while count < len(values) and values[-1 - count] == values[-1]:
        count += 1
    return count
