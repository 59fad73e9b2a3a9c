"""What is to be expected, what was lost, what is an alarm: arithmetic, without any run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.supervisor.resources.alarms import alarms
from unbroken.supervisor.resources.forecast import (
    Pace,
    Trend,
    data_wait_share,
    recent,
    seconds_to_go,
    seconds_until_used_up,
    slope,
    steady_growth,
    steps_per_second,
)
from unbroken.supervisor.resources.totals import AttemptTimes, Lost, lost, totals

times = st.lists(st.integers(0, 10_000), min_size=4, max_size=30, unique=True).map(sorted)


@settings(max_examples=30)
@given(times=times, rate=st.integers(-1000, 1000), base=st.integers(0, 10**9))
def test_the_slope_of_a_straight_line_is_its_rate(times: list[int], rate: int, base: int) -> None:
    assert slope([(second, base + rate * second) for second in times]) == pytest.approx(rate)


@settings(max_examples=40)
@given(times=times, rate=st.integers(1, 1000), wild=st.integers(-(10**12), 10**12), data=st.data())
def test_one_wild_sample_of_many_moves_the_slope_within_that_of_the_others(
    times: list[int], rate: int, wild: int, data: st.DataObject
) -> None:
    samples = [(float(second), float(rate * second)) for second in times]
    place = data.draw(st.integers(0, len(samples) - 1))
    samples[place] = (samples[place][0], float(wild))
    found = slope(samples)
    assert found is not None
    # Of n samples, n - 1 of the n (n - 1) / 2 pairs have the wild one: from five on, fewer than half.
    if len(samples) >= 5:
        assert found == pytest.approx(rate)


@settings(max_examples=30)
@given(times=times, values=st.lists(st.integers(0, 10**12), min_size=30, max_size=30))
def test_growth_is_never_negative_and_nothing_grows_faster_than_its_steepest_pair(
    times: list[int], values: list[int]
) -> None:
    samples = [(float(second), float(value)) for second, value in zip(times, values, strict=False)]
    growth = steady_growth(samples, min_seconds=0)
    steepest = max(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
    )
    assert growth is not None
    assert 0 <= growth <= max(0.0, steepest)


def test_what_grew_only_at_the_start_is_at_rest() -> None:
    start_up = [(float(second), min(second, 300) * 1e6) for second in range(0, 1200, 30)]
    assert steady_growth(start_up, min_seconds=300) == 0.0
    leak = [(second, value + second * 1000) for second, value in start_up]
    assert steady_growth(leak, min_seconds=300) == pytest.approx(1000)
    assert steady_growth(leak[:5], min_seconds=300) is None


def test_saves_that_are_pruned_again_do_not_fill_a_disk_and_kept_ones_do() -> None:
    used = [(60.0 * minute, float(minute % 10 < 5)) for minute in range(60)]
    assert steady_growth(used, min_seconds=1800) == pytest.approx(0, abs=1e-3)
    kept = [(60.0 * minute, 1e9 * (minute // 10)) for minute in range(60)]
    growth = steady_growth(kept, min_seconds=1800)
    assert growth is not None
    assert growth * 600 == pytest.approx(1e9, rel=0.35)


def test_a_trend_holds_few_samples_however_long_it_is_fed() -> None:
    trend = Trend(span_seconds=600, min_seconds=60, points=20)
    for second in range(100_000):
        trend.add(float(second), 5.0 * second)
    assert trend.growth == pytest.approx(5)
    assert len(trend._samples) <= 20
    assert Trend(span_seconds=600, min_seconds=60).growth is None


@pytest.mark.parametrize(
    ("left", "growth", "expected"),
    [(100, 2.0, 50.0), (0, 2.0, 0.0), (-5, 2.0, 0.0), (100, 0.0, None), (100, None, None), (None, 2.0, None)],
)
def test_when_something_is_used_up(left: float | None, growth: float | None, expected: float | None) -> None:
    assert seconds_until_used_up(left, growth) == expected


def paces(*steps: int, every: float = 5.0, waited: float = 0.0) -> list[Pace]:
    return [
        Pace(seconds=every * index, step=step, waited_seconds=waited * index)
        for index, step in enumerate(steps)
    ]


def test_the_pace_is_that_of_the_last_minute_or_of_as_long_as_ten_slow_steps_take() -> None:
    fast = paces(*range(0, 1000, 10))
    assert steps_per_second(recent(fast, min_seconds=60, min_steps=10)) == pytest.approx(2)
    assert recent(fast, min_seconds=60, min_steps=10)[0].seconds == fast[-1].seconds - 60
    slow = paces(*[index // 10 for index in range(200)])
    found = recent(slow, min_seconds=60, min_steps=10)
    assert found[-1].step - found[0].step == 10
    assert steps_per_second(found) == pytest.approx(0.02, rel=0.1)
    assert steps_per_second(paces(7)) is None


def test_a_run_that_hangs_loses_its_pace() -> None:
    hanging = [*paces(*range(0, 120, 10)), Pace(seconds=600, step=110, waited_seconds=0)]
    rate = steps_per_second(recent(hanging, min_seconds=60, min_steps=10))
    assert rate is not None
    assert rate < 0.1


def test_the_share_of_waiting_is_between_nothing_and_all_or_unknown() -> None:
    assert data_wait_share(paces(0, 10, 20, waited=2.0)) == pytest.approx(0.4)
    assert data_wait_share(paces(0, 10, 20, waited=9.0)) == 1.0
    assert data_wait_share(paces(0, 10, 20, waited=0.0)) is None
    assert data_wait_share(paces(5, 5, 5, waited=2.0)) is None
    assert data_wait_share(paces(5)) is None


def test_the_time_to_go_needs_a_goal_and_a_rate() -> None:
    assert seconds_to_go(40, 100, 2.0) == 30
    assert seconds_to_go(100, 100, 2.0) == 0
    assert seconds_to_go(120, 100, 2.0) == 0
    assert seconds_to_go(40, 0, 2.0) is None
    assert seconds_to_go(40, 100, None) is None
    assert seconds_to_go(40, 100, 0.0) is None


# Ten steps in a hundred seconds after ten of starting; ends at 130. The second start, at 140, is
# restored at step 6 and is at step 10 again after 60 s.
FIRST = AttemptTimes(started=0, began=10, began_step=0, regained=10, last=110, last_step=10, ended=130)
SECOND = AttemptTimes(started=140, began=145, began_step=6, regained=205, last=305, last_step=20, ended=320)


def test_lost_is_all_in_which_a_run_got_no_further() -> None:
    assert lost([FIRST], now=130) == Lost()
    both = lost([FIRST, SECOND], now=320)
    assert both == Lost(ending=20, pauses=10, starting=5, redoing=60)
    # From the last step of the first to the moment when the second had made it again.
    assert both.seconds == 205 - 110


@pytest.mark.parametrize(
    ("attempt", "now", "expected"),
    [
        (AttemptTimes(started=140), 150, Lost(ending=20, pauses=10, starting=10)),
        (
            AttemptTimes(started=140, began=145, began_step=6, last=150, last_step=7),
            160,
            Lost(ending=20, pauses=10, starting=5, redoing=15),
        ),
        (
            AttemptTimes(started=140, began=145, began_step=10, regained=145, last=150, last_step=11),
            160,
            Lost(ending=20, pauses=10, starting=5),
        ),
        (
            AttemptTimes(started=1140, began=1145, began_step=10, regained=1145, unkept_seconds=1000),
            1160,
            Lost(ending=20, pauses=10, starting=5),
        ),
    ],
    ids=["starting", "redoing", "nothing to redo", "stopped for a while"],
)
def test_what_a_running_attempt_has_lost_so_far(attempt: AttemptTimes, now: float, expected: Lost) -> None:
    assert lost([FIRST, attempt], now=now) == expected


def test_an_attempt_that_never_made_a_step_was_in_vain() -> None:
    in_vain = AttemptTimes(started=0, ended=30)
    assert lost([in_vain, AttemptTimes(started=40)], now=45) == Lost(starting=35, pauses=10)
    assert lost([in_vain], now=30) == Lost()
    assert lost([], now=1) == Lost()


@given(
    numbers=st.lists(st.tuples(*[st.integers(0, 100)] * 5), min_size=1, max_size=6),
    now=st.integers(0, 10_000),
)
def test_nothing_lost_is_negative_nor_more_than_the_time_that_went_by(
    numbers: list[tuple[int, int, int, int, int]], now: int
) -> None:
    clock, attempts = 0.0, []
    for pause, start, redo, work, ending in numbers:
        started = clock + pause
        began, regained = started + start, started + start + redo
        last = regained + work
        clock = last + ending
        attempts.append(
            AttemptTimes(started=started, began=began, regained=regained, last=last, last_step=1, ended=clock)
        )
    found = lost(attempts, now=clock)
    assert min(found.ending, found.pauses, found.starting, found.redoing) >= 0
    worked = sum(numbers[index][3] for index in range(len(numbers)))
    assert found.seconds <= clock - worked + 1e-6


def test_the_rate_over_restarts_counts_what_was_lost_and_not_what_nobody_wanted() -> None:
    whole = totals([FIRST, SECOND], step=20, goal_step=40, now=310)
    assert whole.steps_per_second == pytest.approx(20 / 300)
    assert whole.to_go_seconds == pytest.approx(300)
    later = AttemptTimes(
        started=1000, began=1010, began_step=10, regained=1010, last=1110, last_step=20, unkept_seconds=860
    )
    assert totals([FIRST, later], step=20, goal_step=0, now=1170).steps_per_second == pytest.approx(20 / 300)
    assert totals([], step=5, goal_step=9, now=1).to_go_seconds is None


def test_of_a_command_that_says_nothing_of_its_steps_nobody_knows_what_was_lost() -> None:
    attempts = [AttemptTimes(started=0, ended=30), AttemptTimes(started=40)]
    assert totals(attempts, step=None, goal_step=None, now=100).lost is None
    assert totals([*attempts[:1], SECOND], step=20, goal_step=None, now=320).lost is not None


@pytest.mark.parametrize(
    ("seen", "standing", "kinds"),
    [
        ((None, None, None), (), []),
        ((3599, None, None), (), ["memory"]),
        ((3601, None, None), (), []),
        ((3601, None, None), ("memory",), ["memory"]),
        ((7201, None, None), ("memory",), []),
        ((None, 5 * 3600, None), (), ["disk"]),
        ((None, 7 * 3600, None), (), []),
        ((None, 7 * 3600, None), ("disk",), ["disk"]),
        ((None, None, 0.31), (), ["loader"]),
        ((None, None, 0.25), (), []),
        ((None, None, 0.25), ("loader",), ["loader"]),
        ((None, None, 0.19), ("loader",), []),
        ((60, 60, 0.9), (), ["memory", "disk", "loader"]),
    ],
)
def test_an_alarm_comes_at_its_threshold_and_goes_well_beyond_it(
    seen: tuple[float | None, float | None, float | None], standing: tuple[str, ...], kinds: list[str]
) -> None:
    memory, disk, share = seen
    due = alarms(memory_seconds=memory, disk_seconds=disk, wait_share=share, standing=standing)
    assert [alarm.kind for alarm in due] == kinds
    assert all(alarm.text and alarm.hint for alarm in due)
