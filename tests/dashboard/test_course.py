"""Curves of any length fit, with their peaks; the time of a run is told without a gap."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.dashboard.axis import value_axis
from unbroken.dashboard.course import course_of
from unbroken.dashboard.report import Ending
from unbroken.dashboard.spent import spent_on
from unbroken.dashboard.thinned import Thinned
from unbroken.rundir.effective import Head, Placed, last_steps, placed

values = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=40, deadline=None)
@given(st.lists(values, max_size=300), st.integers(1, 40), st.integers(1, 9))
def test_a_thinned_curve_keeps_its_extremes_and_what_is_not_finite(
    found: list[float], capacity: int, stride: int
) -> None:
    thinned = Thinned(capacity)
    for index, value in enumerate(found):
        thinned.add(index * stride, value)
    for curve in (thinned, thinned.coarser(max(1, capacity // 2))):
        points = [point for line in curve.lines() for point in line]
        finite = [(index * stride, value) for index, value in enumerate(found) if math.isfinite(value)]
        assert len(points) <= 2 * capacity
        assert all(a[0] < b[0] for a, b in pairwise(points))
        assert set(points) <= set(finite)
        assert bool(curve.not_finite()) == (len(finite) < len(found))
        if finite:
            assert (curve.low() or (0, None))[1] == min(value for _, value in finite)
            assert (curve.high() or (0, None))[1] == max(value for _, value in finite)


def test_a_short_curve_is_kept_as_it_is_with_a_gap_where_it_is_not_finite() -> None:
    thinned = Thinned(10)
    for step, value in enumerate([3.0, 2.0, math.nan, 1.0]):
        thinned.add(step, value)
    assert list(thinned.lines()) == [[(0, 3.0), (1, 2.0)], [(3, 1.0)]]
    assert (thinned.not_finite(), thinned.means()) == ([2], [])


def test_a_spike_of_one_step_in_a_hundred_thousand_is_still_seen() -> None:
    thinned = Thinned(100)
    for step in range(100_000):
        thinned.add(step, 50.0 if step == 54_321 else 1.0)
    assert thinned.high() == (54_321, 50.0)
    assert (54_321, 50.0) in next(thinned.lines())
    assert len(thinned.means()) <= 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_every_value_lies_on_its_axis_and_so_do_its_ticks(found: list[float]) -> None:
    axis = value_axis(found)
    assert axis is not None
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in found if 1e-300 < abs(value) < 1e300)
    assert all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick in axis.ticks(5))
    assert len(axis.ticks(5)) <= 12


def at(time: float, kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, "step": step, **fields}


ATTEMPTS = [
    [
        at(100, "began", 0),
        at(110, "step", 1, metrics={"loss": 3.0}),
        at(120, "step", 2, metrics={"loss": "nan"}),
        at(125, "record", 2, metrics={"accuracy": 0.1}),
        # After a save: five seconds longer than the others.
        at(140, "step", 3, metrics={"loss": 2.0}),
        at(150, "step", 4, metrics={"loss": 1.0}),
        at(160, "rolled-back", 3),
        at(170, "step", 4, metrics={"loss": 0.5}),
        at(180, "step", 5, metrics={"loss": 0.4}),
    ],
    [
        at(230, "began", 4),
        at(240, "step", 5, metrics={"loss": 0.4}),
        at(243, "record", 5, metrics={"accuracy": 0.2}),
        at(244, "completed", 5),
    ],
]
ENDINGS = [
    Ending(attempt=1, outcome="killed", started=95.0, ended=182.0),
    Ending(attempt=2, outcome="completed", started=222.0, ended=246.0),
]


def history() -> list[Placed]:
    last = last_steps([Head(event["kind"], event["step"]) for event in events] for events in ATTEMPTS)
    return list(placed(enumerate(ATTEMPTS, 1), last))


def test_curves_are_of_what_counts_and_the_rest_is_kept_apart() -> None:
    course = course_of(history(), saved={}, keep=["rolled-back"])
    loss = course.curves["loss"]
    assert list(loss.counting.lines()) == [[(1, 3.0)], [(3, 2.0), (4, 0.5), (5, 0.4)]]
    assert loss.counting.not_finite() == [2]
    assert [list(one.lines()) for one in loss.superseded.values()] == [[[(4, 1.0)]], [[(5, 0.4)]]]
    assert loss.last == (5, 0.4)
    assert [one.event["step"] for one in course.kept] == [3]
    assert course.steps == 5
    assert course.ordinary_seconds() == pytest.approx(10, rel=0.05)


def test_an_evaluation_that_was_done_again_replaces_the_first() -> None:
    events = [at(0, "began", 0), at(1, "step", 1), at(2, "record", 1, metrics={"accuracy": 0.1})]
    again = [at(3, "began", 1), at(4, "record", 1, metrics={"accuracy": 0.2})]
    found = placed(enumerate([events, again], 1), [1, None])
    curve = course_of(found, saved={}, keep=()).curves["accuracy"]
    assert list(curve.counting.lines()) == [[(1, 0.2)]]


def test_all_the_time_of_a_run_is_told_once() -> None:
    course = course_of(history(), saved={1: {2}}, keep=())
    events = [{"kind": "run-ended", "time": 190.0}, {"kind": "run-started", "time": 200.0}]
    spent = spent_on(course, endings=ENDINGS, supervised=events, waited={1: 4.0, 2: 0.0})
    found = {one.what: one.seconds for one in spent}
    assert sum(found.values()) == pytest.approx(246 - 95)
    assert found["superseded work"] == pytest.approx(30)
    assert found["evaluating"] == pytest.approx(8)
    assert found["saving"] == pytest.approx(5, abs=0.6)
    assert (found["starting"], found["starting again"]) == pytest.approx((5, 8))
    assert found["ending"] == pytest.approx(2)
    assert found["finishing"] == pytest.approx(1 + 2)
    assert found["between attempts"] == pytest.approx(30)
    assert found["not kept going"] == pytest.approx(10)
    assert found["waiting for data"] == pytest.approx(4 * 55 / 85)
    assert {one.what for one in spent if one.is_lost} == {
        *("superseded work", "starting again", "ending", "between attempts", "not kept going")
    }


def test_more_metrics_than_there_is_room_for_are_named() -> None:
    names = {f"layer {number}": 0.5 for number in range(300)}
    course = course_of(placed([(1, [at(0, "step", 1, metrics=names)])], [None]), saved={}, keep=())
    assert len(course.curves) + len(course.others) == 300
    assert course.others
