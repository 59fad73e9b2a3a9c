from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.checkpoint.retention import (
    CheckpointFacts,
    KeepBest,
    KeepDaily,
    KeepEverySteps,
    KeepHourly,
    KeepLast,
    RetentionPolicy,
    plan_retention,
)
from unbroken.errors import UsageError
from unbroken.rundir.layout import checkpoint_name

START = datetime(2026, 1, 1, tzinfo=UTC)


def facts(*steps: int, minutes: float = 10, **metrics: list[float]) -> list[CheckpointFacts]:
    return [
        CheckpointFacts(
            name=checkpoint_name(step),
            step=step,
            created=START + timedelta(minutes=minutes * index),
            metrics={name: values[index] for name, values in metrics.items()},
        )
        for index, step in enumerate(steps)
    ]


def kept(found: list[CheckpointFacts], *policies: RetentionPolicy) -> list[int]:
    return [int(name.removeprefix("step-")) for name in plan_retention(found, policies).kept]


def test_keep_last_keeps_the_newest() -> None:
    assert kept(facts(1, 2, 3, 4), KeepLast(2)) == [3, 4]


def test_keep_best_keeps_the_highest_or_the_lowest_and_the_newest_besides() -> None:
    found = facts(1, 2, 3, 4, acc=[0.5, 0.9, 0.7, 0.1])
    assert kept(found, KeepBest(2, "acc")) == [2, 3, 4]
    assert kept(found, KeepBest(1, "acc", mode="min")) == [4]


def test_nan_is_never_best_and_of_equals_the_older_is_kept() -> None:
    found = facts(1, 2, 3, 4, acc=[math.nan, 0.9, 0.9, math.nan])
    assert kept(found, KeepBest(1, "acc")) == [2, 4]


def test_a_checkpoint_without_the_metric_is_never_best() -> None:
    found = [*facts(1, 2, acc=[0.1, 0.2]), *facts(3, 4)]
    assert kept(found, KeepBest(1, "acc")) == [2, 4]


def test_keep_every_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    assert kept(facts(5, 10, 12, 19, 25, 31, 32), KeepEverySteps(10)) == [10, 25, 31, 32]


def test_keep_hourly_keeps_the_newest_of_each_of_the_last_hours() -> None:
    assert kept(facts(*range(1, 20), minutes=20), KeepHourly(3)) == [15, 18, 19]


def test_keep_daily_keeps_the_newest_of_each_of_the_last_days_that_have_one() -> None:
    late = CheckpointFacts(name=checkpoint_name(9), step=9, created=START + timedelta(days=40))
    found = [*facts(1, 2, 3, 4, minutes=8 * 60), late]
    assert kept(found, KeepDaily(1)) == [9]
    assert kept(found, KeepDaily(2)) == [4, 9]
    assert kept(found, KeepDaily(99)) == [3, 4, 9]
    assert plan_retention(found, [KeepDaily(3)]).kept["step-00000003"] == (
        "the newest of the day 2026-01-01 UTC"
    )


@pytest.mark.parametrize("policy", [KeepHourly(2), KeepDaily(2)])
def test_hours_and_days_are_those_of_utc_wherever_a_checkpoint_was_written(policy: RetentionPolicy) -> None:
    found = facts(1, 2, 3, 4, 5, minutes=9 * 60)
    elsewhere = timezone(timedelta(hours=5, minutes=30))
    moved = [replace(one, created=one.created.astimezone(elsewhere)) for one in found]
    assert plan_retention(moved, [policy]) == plan_retention(found, [policy])


def test_policies_add_up() -> None:
    found = facts(1, 2, 3, 4, 5, acc=[9, 1, 1, 1, 1])
    assert kept(found, KeepLast(1), KeepBest(1, "acc"), KeepEverySteps(3)) == [1, 3, 5]


def test_every_checkpoint_gets_a_reason() -> None:
    plan = plan_retention(facts(1, 2, 3), [KeepLast(1)], protected={"step-00000002": "pinned"})
    assert plan.kept == {"step-00000002": "pinned", "step-00000003": "the newest"}
    assert plan.pruned == {"step-00000001": "wanted by none of KeepLast(count=1)"}


@pytest.mark.parametrize("policy", [KeepLast, KeepEverySteps, KeepHourly, KeepDaily])
@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_count_below_one_is_refused(policy: type, count: object) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        policy(count)


def test_a_mode_that_is_neither_max_nor_min_is_refused() -> None:
    with pytest.raises(UsageError, match="expected mode 'max' or 'min', found 'best'"):
        KeepBest(1, "acc", mode="best")  # type: ignore[arg-type]


policies = st.lists(
    st.builds(KeepLast, st.integers(1, 5))
    | st.builds(KeepBest, st.integers(1, 3), st.just("acc"), st.sampled_from(["max", "min"]))
    | st.builds(KeepEverySteps, st.integers(1, 20))
    | st.builds(KeepHourly, st.integers(1, 5))
    | st.builds(KeepDaily, st.integers(1, 3)),
    max_size=3,
)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats()), min_size=1, unique_by=lambda at: at[0]).map(sorted),
    policies,
    st.sampled_from([10, 300]),
)
def test_the_newest_always_stays_every_checkpoint_is_judged_once_and_pruning_again_changes_nothing(
    steps: list[tuple[int, float]], chosen: list[RetentionPolicy], minutes: int
) -> None:
    found = facts(*(step for step, _ in steps), minutes=minutes, acc=[value for _, value in steps])
    plan = plan_retention(found, chosen)
    assert found[-1].name in plan.kept
    assert sorted([*plan.kept, *plan.pruned]) == sorted(at.name for at in found)
    left = [at for at in found if at.name in plan.kept]
    again = plan_retention(left, chosen)
    # KeepEverySteps may let go of a checkpoint that stood in for a pruned one, never of the newest.
    assert found[-1].name in again.kept
    if not any(isinstance(policy, KeepEverySteps) for policy in chosen):
        assert again.pruned == {}
