"""Where a drill kills and saves is decided by pure functions, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.drill.plans import (
    DEFAULT_KILLS,
    DEFAULT_STEPS,
    next_kill,
    parse_kill,
    random_kills,
    saves,
    wanted_kills,
)
from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import Kill, Moment

SEEDS = st.integers(0, 10_000)


@given(steps=st.integers(2, 200), count=st.integers(1, 20), seed=SEEDS)
def test_kills_come_in_order_at_different_steps_before_the_last(steps: int, count: int, seed: int) -> None:
    kills = random_kills(steps, count, seed)
    assert len(kills) == min(count, steps - 1)
    assert all(one.step < other.step for one, other in pairwise(kills))
    assert all(1 <= kill.step < steps for kill in kills)


@given(steps=st.integers(2, 200), count=st.integers(1, 20), seed=SEEDS)
def test_each_kill_has_a_checkpoint_of_its_own_before_it_and_after_the_kill_before(
    steps: int, count: int, seed: int
) -> None:
    kills = random_kills(steps, count, seed)
    save_at = saves(kills, seed)
    for before, kill in pairwise([Kill(step=0, moment="in-step"), *kills]):
        assert [step for step in save_at if before.step < step <= kill.step]
        assert kill.moment != "in-save" or kill.step in save_at


@given(seed=SEEDS)
def test_by_default_every_moment_and_every_signal_comes(seed: int) -> None:
    kills = random_kills(DEFAULT_STEPS, DEFAULT_KILLS, seed)
    assert {kill.moment for kill in kills} == set(get_args(Moment))
    assert {kill.signal for kill in kills} == {"SIGKILL", "SIGTERM", "SIGINT"}


@given(seed=SEEDS)
def test_by_default_two_kills_come_so_close_that_they_are_in_one_epoch(seed: int) -> None:
    kills = random_kills(DEFAULT_STEPS, DEFAULT_KILLS, seed)
    assert min(other.step - one.step for one, other in pairwise(kills)) <= 2


def test_the_same_seed_plans_the_same_and_another_one_something_else() -> None:
    assert random_kills(40, 7, 3) == random_kills(40, 7, 3)
    assert random_kills(40, 7, 3) != random_kills(40, 7, 4)


def test_kills_are_spread_over_all_steps() -> None:
    kills = random_kills(1000, 10, 0)
    assert kills[0].step <= 101
    assert kills[-1].step >= 899


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        ("17", Kill(step=17, moment="after-step")),
        ("17:in-save", Kill(step=17, moment="in-save")),
        ("12:SIGTERM", Kill(step=12, moment="after-step", signal="SIGTERM")),
        ("20:in-step:SIGINT", Kill(step=20, moment="in-step", signal="SIGINT")),
        ("20:SIGINT:in-step", Kill(step=20, moment="in-step", signal="SIGINT")),
    ],
)
def test_a_kill_is_written_as_a_step_a_moment_and_a_signal(text: str, kill: Kill) -> None:
    assert parse_kill(text) == kill


@pytest.mark.parametrize("text", ["", "in-save", "0", "-3", "4:later", "4:SIGTERM:SIGINT", "4:SIGHUP"])
def test_what_is_no_kill_is_a_usage_error_that_shows_one(text: str) -> None:
    with pytest.raises(UsageError, match="--at") as caught:
        parse_kill(text)
    assert "20:in-save:SIGTERM" in caught.value.hint


def test_wanted_kills_are_put_in_order() -> None:
    kills = [parse_kill("20"), parse_kill("4")]
    assert [kill.step for kill in wanted_kills(kills, 30)] == [4, 20]


@pytest.mark.parametrize("steps", [[30], [31], [4, 4]])
def test_wanted_kills_must_come_before_the_end_and_at_different_steps(steps: list[int]) -> None:
    with pytest.raises(UsageError, match="expected"):
        wanted_kills([Kill(step=step, moment="in-step") for step in steps], 30)


def test_a_kill_that_was_overtaken_by_a_late_one_comes_a_step_later() -> None:
    kill = Kill(step=8, moment="in-step", signal="SIGTERM")
    assert next_kill(kill, reached=3, steps=20) == kill
    assert next_kill(kill, reached=10, steps=20) == Kill(step=11, moment="in-step", signal="SIGTERM")
    assert next_kill(kill, reached=19, steps=20) is None
