"""Which checkpoints to keep. Pure: facts in, a plan with a reason for each checkpoint out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, Protocol

from unbroken.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What retention knows about a checkpoint; `created` is its time in UTC.

    One that is not good (NaN in trained parameters, or it failed the user's check) is nothing to go on from.
    """

    name: str
    step: int
    created: datetime
    metrics: dict[str, float] = field(default_factory=dict)
    is_good: bool = True


class RetentionPolicy(Protocol):
    """Names what it wants kept; what no policy of a run wants is pruned."""

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Return `name -> reason` for what to keep of `checkpoints`, the good ones, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest `count` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        _at_least_one("KeepLast", self.count)

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        return {found.name: f"one of the last {self.count}" for found in checkpoints[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the `count` checkpoints with the best value of `metric`; of equals, the older."""

    count: int
    metric: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        _at_least_one("KeepBest", self.count)
        if self.mode not in ("max", "min"):
            raise UsageError(
                f"KeepBest: expected mode 'max' or 'min', found {self.mode!r}",
                hint="use mode='min' for a loss, mode='max' for an accuracy",
            )

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        sign = -1 if self.mode == "max" else 1
        # NaN compares with nothing: a checkpoint whose metric is NaN is never a best one.
        rated = [
            (sign * found.metrics[self.metric], found.step, found.name)
            for found in checkpoints
            if not math.isnan(found.metrics.get(self.metric, math.nan))
        ]
        return {
            name: f"{self.metric} {sign * value:g} is among the best {self.count}"
            for value, _, name in sorted(rated)[: self.count]
        }


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """Keep the first checkpoint at or after each multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_one("KeepEverySteps", self.steps)

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        kept: dict[str, str] = {}
        last = 0
        for found in checkpoints:
            period = found.step // self.steps
            if period > last:
                kept[found.name] = f"the first at or after step {period * self.steps}"
                last = period
        return kept


@dataclass(frozen=True, slots=True)
class KeepHourly:
    """Keep the newest checkpoint of each of the last `hours` clock hours that have one."""

    hours: int

    def __post_init__(self) -> None:
        _at_least_one("KeepHourly", self.hours)

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        found = _newest_of_each(checkpoints, "%Y-%m-%d %H:00", self.hours)
        return {name: f"the newest of the hour {hour} UTC" for hour, name in found.items()}


@dataclass(frozen=True, slots=True)
class KeepDaily:
    """Keep the newest checkpoint of each of the last `days` days (in UTC) that have one."""

    days: int

    def __post_init__(self) -> None:
        _at_least_one("KeepDaily", self.days)

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        found = _newest_of_each(checkpoints, "%Y-%m-%d", self.days)
        return {name: f"the newest of the day {day} UTC" for day, name in found.items()}


def _newest_of_each(checkpoints: Sequence[CheckpointFacts], form: str, count: int) -> dict[str, str]:
    """Return `span -> name` of the newest checkpoint in each of the last `count` spans that have one."""
    newest = {found.created.astimezone(UTC).strftime(form): found.name for found in checkpoints}
    return {span: newest[span] for span in sorted(newest)[-count:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """`kept` and `pruned` give the reason for each checkpoint, oldest first.

    `blocked` says why nothing may be pruned now although something is unwanted, or is None.
    """

    kept: dict[str, str]
    pruned: dict[str, str]
    blocked: str | None = None


def plan_retention(
    checkpoints: Sequence[CheckpointFacts],
    policies: Sequence[RetentionPolicy],
    *,
    protected: dict[str, str] | None = None,
) -> RetentionPlan:
    """Return what to keep of `checkpoints` (oldest first) and what to prune, with reasons.

    The newest checkpoint, the newest to go on from, the newest that is not good (as evidence), and those in
    `protected` (`name -> reason`) stay, whatever the policies say. They are asked about the good ones alone,
    if there are any: others would take the places of those that a run can go back to.
    """
    kept = dict(protected or {})
    good = [found for found in checkpoints if found.is_good]
    if checkpoints:
        kept.setdefault(checkpoints[-1].name, "the newest")
        kept.setdefault(newest_to_go_on_from(checkpoints).name, "the newest to go on from")
    for bad in [found for found in checkpoints if not found.is_good][-1:]:
        kept.setdefault(bad.name, "the newest that is not good, as evidence")
    for policy in policies:
        for name, reason in policy.keeps(good or checkpoints).items():
            kept.setdefault(name, reason)
    unwanted = "wanted by none of " + ", ".join(repr(policy) for policy in policies)
    names = [found.name for found in checkpoints]
    return RetentionPlan(
        kept={name: kept[name] for name in names if name in kept},
        pruned={name: unwanted for name in names if name not in kept},
    )


def newest_to_go_on_from(checkpoints: Sequence[CheckpointFacts]) -> CheckpointFacts:
    """Return the newest of `checkpoints`, oldest first, that is good, or of all if none is."""
    return next((found for found in reversed(checkpoints) if found.is_good), checkpoints[-1])


def _at_least_one(policy: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"{policy}: expected a whole number of at least 1, found {count!r}",
            hint="to keep everything, use keep=[]",
        )
