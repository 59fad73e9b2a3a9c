"""Where a rehearsal kills and saves: decided before it begins, the same for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import get_args

import msgspec

from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import Kill, Moment, SignalName

DEFAULT_STEPS = 40
DEFAULT_KILLS = 7
# Each moment once by SIGKILL before anything comes twice; a request to stop is obeyed the same way wherever
# it comes, so few of them tell enough.
_MOMENTS: tuple[Moment, ...] = get_args(Moment)
_SIGNALS: tuple[SignalName, ...] = get_args(SignalName)
_FURTHER: tuple[tuple[Moment, SignalName], ...] = (
    ("in-step", "SIGTERM"),
    ("after-step", "SIGINT"),
    ("in-step", "SIGKILL"),
    ("in-save", "SIGKILL"),
    ("in-evaluation", "SIGTERM"),
    ("after-step", "SIGKILL"),
)
# So that steps are lost and done again, as they are in life.
_MOST_LOST_STEPS = 2


def parse_kill(text: str) -> Kill:
    """Return the kill that `text` describes: a step, then a moment, a signal or both after colons.

    >>> parse_kill("20:in-save").moment, parse_kill("12:SIGTERM").signal, parse_kill("17").moment
    ('in-save', 'SIGTERM', 'after-step')
    """
    step, *words = text.split(":")
    moments = [moment for moment in _MOMENTS if moment in words]
    signals = [signal for signal in _SIGNALS if signal in words]
    if not step.isdecimal() or int(step) < 1 or len(moments) > 1 or len(signals) > 1:
        raise _bad_kill(text)
    if len(words) != len(moments) + len(signals):
        raise _bad_kill(text)
    return Kill(
        step=int(step),
        moment=moments[0] if moments else "after-step",
        signal=signals[0] if signals else "SIGKILL",
    )


def random_kills(steps: int, count: int, seed: int) -> tuple[Kill, ...]:
    """Return up to `count` kills in the order they come in, of a script that takes `steps` steps.

    They are spread over the steps, and two of them follow each other closely, to be in one epoch. Each
    moment comes at least once if `count` allows.
    """
    choice = random.Random(seed)
    at = _spread(steps, count, choice)
    kinds: list[tuple[Moment, SignalName]] = [(moment, "SIGKILL") for moment in _MOMENTS]
    while len(kinds) < len(at):
        kinds.append(_FURTHER[(len(kinds) - len(_MOMENTS)) % len(_FURTHER)])
    choice.shuffle(kinds)
    return tuple(
        Kill(step=step, moment=moment, signal=signal)
        for step, (moment, signal) in zip(at, kinds, strict=False)
    )


def wanted_kills(kills: Sequence[Kill], steps: int) -> tuple[Kill, ...]:
    """Return the kills that a user asked for in order.

    Raises UsageError if one comes when the script is over, or two come at the same step.
    """
    for kill in kills:
        if kill.step >= steps:
            raise UsageError(
                f"--at {kill.step}: expected a step before the last one, which is {steps}",
                hint="choose an earlier step, or more of them with --steps",
            )
    ordered = sorted(kills, key=lambda kill: kill.step)
    for one, other in itertools.pairwise(ordered):
        if one.step == other.step:
            raise UsageError(
                f"--at {one.step}: expected different steps, found this one twice",
                hint="a run that was resumed has to make a step before it is killed again",
            )
    return tuple(ordered)


def saves(kills: Sequence[Kill], seed: int) -> tuple[int, ...]:
    """Return the steps to save after: one before each kill and after the kill before, so that all resume
    from another checkpoint and do some steps again."""
    choice = random.Random(seed)
    found, before = set(), 0
    for kill in kills:
        earliest = max(before + 1, kill.step - _MOST_LOST_STEPS)
        found.add(choice.randint(earliest, max(earliest, kill.step - 1)))
        if kill.moment == "in-save":
            found.add(kill.step)
        before = kill.step
    return tuple(sorted(found))


def next_kill(kill: Kill, reached: int, steps: int) -> Kill | None:
    """Return `kill` as it can still come in a run that has come to step `reached`; None if it is too late.

    A kill that waited for its moment may have come later than planned.
    """
    step = max(kill.step, reached + 1)
    return msgspec.structs.replace(kill, step=step) if step < steps else None


def _spread(steps: int, count: int, choice: random.Random) -> list[int]:
    count = min(count, steps - 1)
    if count <= 0:
        return []
    bounds = [1 + round(index * (steps - 1) / count) for index in range(count + 1)]
    found = [choice.randrange(low, high) for low, high in itertools.pairwise(bounds)]
    middle = len(found) // 2
    # Between the two there must be room for a checkpoint of its own.
    if middle > 0 and found[middle - 1] + 2 < found[middle]:
        found[middle] = found[middle - 1] + 2
    return found


def _bad_kill(text: str) -> UsageError:
    return UsageError(
        f"--at {text}: expected a step, then a moment or a signal after colons",
        hint=f"such as 20:in-save:SIGTERM; moments: {', '.join(_MOMENTS)}; signals: {', '.join(_SIGNALS)}",
    )
