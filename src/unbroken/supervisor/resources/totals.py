"""What a run has got for its time, over all its attempts: pure arithmetic on when they did what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.supervisor.resources.forecast import seconds_to_go


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """When an attempt did what, in seconds since 1970; None for what it did not do, or not yet.

    `began` is when its state was restored, at `began_step`; `regained` when it was as far as any
    attempt before it; `last` when it completed its last step so far; `last_step` is the farthest one.
    `redone` are the times from where it was rolled back, and went on, to where it was as far as before, or
    None if it did not come as far again. `unkept_seconds`, just before its start, are those in which nobody
    kept the run going, as after a stop.
    """

    started: float
    ended: float | None = None
    began: float | None = None
    began_step: int = 0
    regained: float | None = None
    last: float | None = None
    last_step: int = 0
    redone: tuple[tuple[float, float | None], ...] = ()
    unkept_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The seconds in which a run got no further, by what they were spent on.

    `ending` is from the last step of an attempt to its end, `pauses` lie between attempts, `starting` is
    until a restarted attempt has its state, `redoing` until it is as far as the run was before, also after
    a roll-back without a restart.
    """

    ending: float = 0.0
    pauses: float = 0.0
    starting: float = 0.0
    redoing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ending + self.pauses + self.starting + self.redoing


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Over all attempts: steps a second with all that was lost, what was lost, seconds until the goal.

    None is what cannot be told: `to_go_seconds` without a goal or before the first step, `lost` of a command
    that does not use the library.
    """

    steps_per_second: float | None
    lost: Lost | None
    to_go_seconds: float | None


def totals(
    attempts: Sequence[AttemptTimes], *, step: int | None, goal_step: int | None, now: float
) -> Totals:
    """Return the totals of a run that is at `step`; `now` is the time, or when its last attempt ended.

    While it starts again its step is None.
    """
    farthest = max([step or 0, *(attempt.last_step for attempt in attempts)])
    rate = _rate(attempts, farthest, now)
    return Totals(
        steps_per_second=rate,
        lost=lost(attempts, now=now) if any(attempt.began is not None for attempt in attempts) else None,
        to_go_seconds=seconds_to_go(farthest if step is None else step, goal_step or 0, rate),
    )


def lost(attempts: Sequence[AttemptTimes], *, now: float) -> Lost:
    """Return what a run of these attempts, oldest first, has lost until `now`.

    The first start is no loss, nor is what follows the last step of the last attempt.
    """
    ending = pauses = starting = redoing = 0.0
    for index, attempt in enumerate(attempts):
        is_last = index == len(attempts) - 1
        end = now if attempt.ended is None else attempt.ended
        if index > 0:
            before = attempts[index - 1].ended
            if before is not None:
                pauses += max(0.0, attempt.started - before - attempt.unkept_seconds)
            starting += max(0.0, (end if attempt.began is None else attempt.began) - attempt.started)
        elif attempt.last is None and not is_last:
            # It never made a step: all of it was in vain.
            starting += max(0.0, end - attempt.started)
        again = _redone(attempt, is_restarted=index > 0)
        redoing += _union_seconds([(since, end if until is None else until) for since, until in again])
        is_as_far = attempt.regained is not None and all(until is not None for _, until in again)
        if not is_last and is_as_far and attempt.regained is not None and attempt.last is not None:
            ending += max(0.0, end - max(attempt.last, attempt.regained))
    return Lost(ending=ending, pauses=pauses, starting=starting, redoing=redoing)


def _redone(attempt: AttemptTimes, *, is_restarted: bool) -> list[tuple[float, float | None]]:
    restart = [(attempt.began, attempt.regained)] if is_restarted and attempt.began is not None else []
    return [*restart, *attempt.redone]


def _union_seconds(times: Sequence[tuple[float, float]]) -> float:
    """Return how long these times are together, what they share counted once."""
    seconds, until = 0.0, -math.inf
    for since, end in sorted(times):
        seconds += max(0.0, end - max(since, until))
        until = max(until, end)
    return seconds


def _rate(attempts: Sequence[AttemptTimes], step: int, now: float) -> float | None:
    began = [(attempt.began, attempt.began_step) for attempt in attempts if attempt.began is not None]
    if not began:
        return None
    since, first_step = began[0]
    unkept = sum(attempt.unkept_seconds for attempt in attempts if attempt.started > since)
    seconds = now - since - unkept
    return (step - first_step) / seconds if step > first_step and seconds > 0 else None
