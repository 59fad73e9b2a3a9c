"""How long each phase of a run may be silent, and what a silence means: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from unbroken.supervisor.hangs.hang_policy import (
    Course,
    HangPolicy,
    Limit,
    Pace,
    Sight,
    advance,
    begin,
    degree,
    ended,
    limit,
    without,
)

LEARNED = HangPolicy()
MINUTE, HOUR = 60.0, 3600.0


def course(looks: Iterable[tuple[float, str, int, int]], pace: Pace | None = None) -> Course:
    """Return the course after looks at (time, phase, step, progress)."""
    found = begin(pace or Pace(), 0.0)
    for now, phase, step, progress in looks:
        sight = Sight(now_seconds=now, beat_seconds=now, phase=phase, step=step, progress=progress)
        found = advance(found, sight)
    return found


def stepping(seconds: float, steps: int, start: float = 10.0) -> list[tuple[float, str, int, int]]:
    return [
        (1.0, "restoring", 0, 0),
        *((start + seconds * n, "training", n, 2 * n) for n in range(1, steps + 1)),
    ]


class TestLimits:
    @pytest.mark.parametrize(
        ("seconds", "steps", "expected"),
        [
            # Ten times the slowest of a hundred steps, within bounds; nothing is known before fifty.
            (30.0, 100, 300.0),
            (0.1, 100, 3 * MINUTE),
            (1000.0, 100, HOUR),
            (30.0, 40, HOUR),
        ],
    )
    def test_a_step_is_measured_by_the_steps_before_it(
        self, seconds: float, steps: int, expected: float
    ) -> None:
        allowed = limit(LEARNED, course(stepping(seconds, steps)))
        assert allowed == Limit(seconds=expected, cap_seconds=HOUR)

    def test_one_slow_step_in_a_hundred_does_not_count_and_two_do(self) -> None:
        def after(slow: int) -> float:
            pace = Pace(intervals=(30.0,) * (200 - slow) + (200.0,) * slow, steps=200)
            return limit(LEARNED, replace(course([]), phase="training", pace=pace)).seconds

        assert (after(2), after(3)) == (300.0, 2000.0)

    def test_warm_up_and_what_is_no_training_are_no_steps(self) -> None:
        looks = [
            *stepping(30.0, 60),
            # An evaluation of an hour between two steps, and a save of ten minutes.
            (5000.0, "evaluating", 60, 121),
            (8600.0, "training", 60, 122),
            (8630.0, "training", 61, 124),
            (8640.0, "saving", 61, 124),
            (9240.0, "training", 61, 124),
            (9270.0, "training", 62, 126),
        ]
        pace = course(looks).pace
        assert max(pace.intervals) == pytest.approx(30.0)
        # The first is not seen to begin, five more are warm-up.
        assert pace.steps < 60

    @pytest.mark.parametrize("phase", ["startup", "restoring", "compiling"])
    def test_a_start_may_take_an_hour_as_long_as_nothing_is_known(self, phase: str) -> None:
        found = replace(course([]), phase=phase)
        assert limit(LEARNED, found).seconds == HOUR
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 20.0}))).seconds == 10 * MINUTE
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 200.0}))).seconds == 2000.0

    @pytest.mark.parametrize("phase", ["evaluating", "saving", "stopping"])
    def test_evaluations_and_saves_are_measured_by_the_longest_so_far(self, phase: str) -> None:
        found = replace(course([]), phase=phase)
        assert limit(LEARNED, found).seconds == 6 * HOUR
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 2.0}))).seconds == 10 * MINUTE
        assert limit(LEARNED, replace(found, pace=Pace(longest={phase: 900.0}))).seconds == 9000.0

    def test_a_limit_of_the_user_is_for_steps_alone_and_is_obeyed_as_given(self) -> None:
        policy = HangPolicy(step_seconds=2.0)
        assert limit(policy, course(stepping(30.0, 100))) == Limit(seconds=2.0, cap_seconds=2.0)
        assert limit(policy, replace(course([]), phase="evaluating")).seconds == 6 * HOUR
        given = Limit(seconds=600.0, cap_seconds=600.0)
        at = (299, 300, 399, 400, 599, 600)
        degrees = ["fine", "slow", "slow", "suspect", "suspect", "hung"]
        assert [degree(seconds, given, moves=True) for seconds in at] == degrees
        assert [degree(seconds, given, moves=False) for seconds in at] == degrees

    @pytest.mark.parametrize("phase", ["disk-full", "done"])
    def test_a_disk_that_is_full_is_no_hang_and_neither_is_what_follows_training(self, phase: str) -> None:
        assert limit(LEARNED, replace(course([]), phase=phase)).seconds == math.inf

    def test_what_was_learned_is_kept_over_attempts_and_the_start_has_its_own_limit_again(self) -> None:
        pace = Pace.from_json(course(stepping(30.0, 100)).pace.to_json())
        again = course([(1.0, "restoring", 100, 0), (2.0, "training", 100, 0)], pace)
        assert again.phase == "compiling"
        assert limit(LEARNED, again).seconds == 10 * MINUTE
        assert limit(LEARNED, course(stepping(30.0, 3), pace)).seconds == 300.0

    def test_one_that_was_ended_at_a_step_has_as_long_as_an_evaluation_when_it_comes_there_again(
        self,
    ) -> None:
        """An evaluation between two steps that shows no progress looks like a hang."""
        found = ended(course(stepping(0.1, 100)))
        pace = Pace.from_json(found.pace.to_json())
        allowed = limit(LEARNED, course(stepping(0.1, 100), pace))
        assert allowed == Limit(seconds=HOUR, cap_seconds=6 * HOUR)
        assert limit(LEARNED, course(stepping(0.1, 99), pace)).seconds == 3 * MINUTE
        assert limit(HangPolicy(step_seconds=2.0), course(stepping(0.1, 100), pace)).seconds == 2.0

    def test_of_what_was_not_watched_from_its_beginning_nothing_is_learned(self) -> None:
        """An attempt that is adopted: its first look seemed to be a start of no time."""
        found = begin(Pace(), 1000.0, is_adopted=True)
        for now, phase in ((500.0, "evaluating"), (1001.0, "training"), (1100.0, "evaluating")):
            sight = Sight(now_seconds=max(now, 1000.0), beat_seconds=now, phase=phase, step=7, progress=99)
            found = advance(found, sight)
        assert "startup" not in found.pace.longest
        assert found.is_known
        found = advance(found, replace(sight, beat_seconds=1160.0, phase="training"))
        assert found.pace.longest["evaluating"] == 60.0

    def test_a_time_in_which_nothing_could_run_is_no_silence_and_no_step(self) -> None:
        found = without(course(stepping(1.0, 60)), 6000.0)
        assert found.since_seconds == 6070.0
        after = Sight(now_seconds=6071.5, beat_seconds=6071.0, phase="training", step=61, progress=122)
        assert max(advance(found, after).pace.intervals) == pytest.approx(1.0)


class TestDegrees:
    @pytest.mark.parametrize(
        ("silent", "moves", "expected"),
        [
            (29, False, "fine"),
            (30, False, "slow"),
            (60, False, "suspect"),
            (89, False, "suspect"),
            (90, False, "hung"),
            # What computes or reads has until the cap: a limit that was learned is a guess.
            (90, True, "suspect"),
            (3599, True, "suspect"),
            (3600, True, "hung"),
        ],
    )
    def test_a_silence_is_told_then_looked_at_then_ended(
        self, silent: float, moves: bool, expected: str
    ) -> None:
        assert degree(silent, Limit(seconds=60, cap_seconds=3600), moves=moves) == expected

    def test_progress_is_a_batch_or_a_step_and_not_a_beat(self) -> None:
        looks = [*stepping(1.0, 10), (100.0, "training", 10, 20), (200.0, "training", 10, 20)]
        assert course(looks).since_seconds == 20.0
        assert course([*looks, (300.0, "training", 10, 21)]).since_seconds == 300.0
