"""The end of a machine or of a job that is known in advance, and when to stop for it: pure rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unbroken.errors import EXIT_RUN_ME_AGAIN
from unbroken.rundir.control import StopRequest
from unbroken.supervisor.restart_policy import Decision

# What is left for ending the processes and for the last records, or a tenth of the time if that is less.
_MARGIN_SECONDS = 10.0
_MARGIN_SHARE = 0.1
_SAVES = 2.0
# Or the grace if that is less. Clocks differ, notices come late, and what was to end may still be there
# long after: no end that is near or past is a reason to kill what could be saved.
_LEAST_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the machine or the job, `at_seconds` since 1970, in words `what`, by whom it is said.

    `lead_seconds` is how long before it the stop is asked for at the latest.
    """

    who: str
    what: str
    at_seconds: float
    known_seconds: float
    lead_seconds: float

    @property
    def margin_seconds(self) -> float:
        return min(_MARGIN_SECONDS, _MARGIN_SHARE * max(0.0, self.at_seconds - self.known_seconds))


def time_to_stop(
    ending: Ending, *, now_seconds: float, save_seconds: float, grace_seconds: float
) -> float | None:
    """Return how long a stop may take from now, or None if training can go on for a while.

    Asked for in time for two saves like the last one, for the grace, and for the ending's own lead; but not
    in the first half of the time that there is, or a short job would do nothing else.
    """
    needed = max(_SAVES * save_seconds, grace_seconds) + ending.margin_seconds
    half = (ending.at_seconds - ending.known_seconds) / 2
    lead = max(ending.lead_seconds, min(needed, half))
    left = ending.at_seconds - now_seconds
    least = min(_LEAST_SECONDS, grace_seconds)
    return None if left > lead else max(least, left - ending.margin_seconds)


def handed_over(decision: Decision, request: StopRequest | None) -> Decision:
    """Return `decision`, with a run that was stopped by a preemption handed over: it is to be run again."""
    if decision.action != "stopped" or request is None or not request.is_preemption:
        return decision
    return replace(decision, action="hand-over", exit_code=EXIT_RUN_ME_AGAIN)
