"""The watch over losses finds what is planted, at once, and leaves trainings alone that are well."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unbroken
from unbroken.training.health.findings import Finding
from unbroken.training.health.watch import HealthWatch

from .loss_curves import CALM, WILD, Curve, curve

STEPS = 1200
RECORDED = json.loads((Path(__file__).parent / "recorded_losses.json").read_text())


def found_in(
    losses: Iterable[float], watch: HealthWatch | None = None, first: int = 1, every: int = 1
) -> list[Finding]:
    watch = watch or HealthWatch(unbroken.Health())
    found = []
    for step, loss in enumerate(losses, first):
        watch.step(step, {} if step % every else {"loss": loss})
        found += list(iter(watch.take, None))
    return found


def times_ten(loss: float) -> float:
    return loss + 9 * abs(loss)


@pytest.mark.parametrize("name", [*CALM, *WILD])
def test_no_usual_curve_alarms_anybody(name: str) -> None:
    for seed in (3, 4, 5):
        assert found_in(curve((CALM | WILD)[name], seed, STEPS)) == []


@pytest.mark.parametrize("name", ["exponential", "epoch borders", "heavy tails", "through zero"])
def test_no_usual_curve_alarms_anybody_that_is_told_at_each_tenth_step(name: str) -> None:
    assert found_in(curve((CALM | WILD)[name], 6, 10 * STEPS), every=10) == []


@pytest.mark.parametrize("name", RECORDED)
def test_the_losses_of_the_example_trainings_alarm_nobody(name: str) -> None:
    assert len(RECORDED[name]) > 500
    assert found_in(RECORDED[name]) == []


@pytest.mark.parametrize("shape", CALM.values(), ids=CALM)
@pytest.mark.parametrize("lasts", [1, 3])
def test_ten_times_the_loss_is_found_within_three_steps(shape: Curve, lasts: int) -> None:
    losses = curve(shape, 7, STEPS)
    watch = HealthWatch(unbroken.Health())
    begin = 0
    for at in (200, 451, 850):
        assert found_in(losses[begin:at], watch, begin + 1) == []
        state = watch.state()
        spike = [times_ten(loss) if place < lasts else loss for place, loss in enumerate(losses[at : at + 3])]
        (finding,) = found_in(spike, watch, at + 1)
        assert (finding.kind, finding.action) == ("spike", "roll-back")
        assert (finding.first_step, finding.trusted_step) == (at + 1, at - 1)
        assert at + 1 <= finding.step <= at + 3
        watch.restore(state)
        begin = at


@pytest.mark.parametrize(
    "name", ["heavy tails", "very heavy tails", "a short last batch", "values of a critic"]
)
def test_in_wild_noise_three_such_losses_in_a_row_are_needed(name: str) -> None:
    losses, at = curve(WILD[name], 11, 700), 650
    watch = HealthWatch(unbroken.Health())
    assert found_in(losses[:at], watch) == []
    (finding,) = found_in(map(times_ten, losses[at : at + 3]), watch, at + 1)
    assert finding.first_step == at + 1


@pytest.mark.parametrize("outlier", [30.0, 1e3, 1e6, 1.7e308])
@pytest.mark.parametrize("at", [30, 100])
def test_one_loss_out_of_all_proportion_blinds_nobody(outlier: float, at: int) -> None:
    losses = curve(CALM["plateau with noise"], 2, 200)
    losses[at] = outlier
    before = found_in(losses, watch := HealthWatch(unbroken.Health(action="warn")))
    # In the warm-up nothing is found.
    assert [finding.step for finding in before] == [at + 1] * (at > 50)
    assert [finding.first_step for finding in found_in([6.9, 7.1, 7.0], watch, 201)] == [201]


def test_a_run_goes_on_from_a_state_after_the_largest_loss_there_is() -> None:
    watch = HealthWatch(unbroken.Health(action="warn"))
    (finding,) = found_in([*(loss / 20 for loss in curve(CALM["exponential"], 2, 99)), 1.7e308, 0.5], watch)
    assert "is far above the median" in finding.text
    resumed = HealthWatch(unbroken.Health(action="warn"))
    resumed.restore(json.loads(json.dumps(watch.state(), allow_nan=False)))
    assert found_in([0.08] * 5, resumed, 102) == []


def test_a_level_that_jumps_and_stays_is_told_at_once_and_when_it_has_stayed() -> None:
    losses = curve(CALM["plateau with noise"], 2, 700)
    watch = HealthWatch(unbroken.Health(action="warn"))
    found = found_in([loss * (20 if step >= 300 else 1) for step, loss in enumerate(losses)], watch)
    assert [(finding.kind, finding.first_step) for finding in found] == [("spike", 301), ("divergence", 301)]


def test_losses_around_zero_that_grow_are_a_divergence_whatever_their_signs() -> None:
    # Their median is below that of the quiet ones.
    loud = [*[-1.0] * 24, *[0.05] * 5, *[1.0] * 21]
    watch = HealthWatch(unbroken.Health(spike="off"))
    (finding,) = found_in([*[0.1, -0.1] * 125, *loud * 3], watch)
    assert (finding.kind, finding.first_step, finding.step) == ("divergence", 251, 400)


def test_a_finding_says_how_far_off_the_loss_is() -> None:
    (finding,) = found_in([*[23.8, 23.9] * 30, 812.4])
    assert finding.text == "loss 812.4 at step 61 is 34 times the median of the last 32 (23.9)"


def test_a_divergence_is_found_with_the_step_from_which_the_losses_rose() -> None:
    losses = curve(CALM["exponential"], 5, 1000)
    (finding,) = found_in([*losses, *rising(losses[-1])])
    assert finding.kind == "divergence"
    assert 1000 < finding.first_step <= 1200
    assert finding.trusted_step == finding.first_step - 2
    assert finding.step <= 1400


def rising(level: float) -> list[float]:
    """From one level to the eightfold in 300 steps, too slowly for a spike."""
    rng = random.Random(1)
    return [level * (1 + 7 * min(1, step / 300)) * (1 + rng.gauss(0, 0.05)) for step in range(400)]


def test_a_loss_that_rises_as_its_rate_does_is_no_divergence() -> None:
    rate = [0.1]
    watch = HealthWatch(unbroken.Health(), rate=lambda: rate[0])
    for step in range(1, 1200):
        # A cyclic schedule: the loss follows the rate.
        rate[0] = 0.01 + 0.1 * (1 - abs(step % 600 / 300 - 1))
        watch.step(step, {"loss": 20 * rate[0] * (1 + 0.05 * math.sin(step))})
    assert watch.take() is None


def test_at_a_warm_restart_of_the_schedule_the_loss_may_jump() -> None:
    def losses_with(jump: float) -> list[Finding]:
        rate = [0.001]
        watch = HealthWatch(unbroken.Health(), rate=lambda: rate[0])
        for step in range(1, 300):
            if step == 200:
                rate[0] *= jump
            watch.step(step, {"loss": (0.05 if step < 200 else 0.6) * (1 + 0.05 * math.sin(step))})
        found = watch.take()
        return [] if found is None else [found]

    assert losses_with(jump=100) == []
    assert [finding.first_step for finding in losses_with(jump=1)] == [200]


def test_a_rate_that_dips_now_and_then_blinds_nobody() -> None:
    rate = [0.1]
    watch = HealthWatch(unbroken.Health(), rate=lambda: rate[0])
    found = []
    for step, loss in enumerate(curve(CALM["plateau with noise"], 3, 300), 1):
        rate[0] = 0.01 if step % 20 == 0 else 0.1
        watch.step(step, {"loss": loss * (10 if 250 < step <= 253 else 1)})
        found += list(iter(watch.take, None))
    assert [finding.first_step for finding in found] == [251]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_is_found_in_its_step(bad: float, name: str) -> None:
    watch = HealthWatch(unbroken.Health())
    watch.step(1, {"loss": 1.0, "grad_norm": 2.0})
    watch.step(2, {"loss": 1.0, "grad_norm": 2.0, name: bad})
    finding = watch.take()
    assert finding is not None
    assert (finding.kind, finding.first_step, finding.step, finding.trusted_step) == ("non-finite", 2, 2, 1)
    assert finding.text == f"{name} {float(bad) if abs(bad) != 10**400 else math.inf} at step 2"


def test_of_losses_that_are_not_given_in_each_step_the_first_bad_step_may_be_an_earlier_one() -> None:
    watch = HealthWatch(unbroken.Health())
    for step in range(1, 25):
        watch.step(step, {} if step % 10 else {"loss": 1.0 if step < 20 else math.nan})
    finding = watch.take()
    assert finding is not None
    assert (finding.first_step, finding.step, finding.trusted_step) == (11, 20, 10)


def test_a_gradient_scaler_may_leave_out_steps_whose_gradients_overflow() -> None:
    watch = HealthWatch(unbroken.Health(), has_scaler=lambda: True)
    for step in range(1, 20):
        watch.step(step, {"loss": 1.0, "grad_norm": math.inf if step < 16 else 1.0})
    assert watch.take() is None
    for step in range(20, 60):
        watch.step(step, {"loss": 1.0, "grad_norm": math.nan})
    finding = watch.take()
    assert finding is not None
    assert (finding.first_step, finding.step, finding.trusted_step) == (20, 44, 19)
    assert finding.text == "grad_norm nan at step 44, not finite since step 20"
    # No scale has a part in the loss.
    watch.step(60, {"loss": math.inf, "grad_norm": math.nan})
    finding = watch.take()
    assert finding is not None
    assert (finding.first_step, finding.text) == (60, "loss inf at step 60")


def test_a_number_that_is_finite_says_nothing_of_another() -> None:
    watch = HealthWatch(unbroken.Health(action="warn"))
    found = []
    for step in range(1, 101):
        loss = math.nan if 30 <= step < 80 else 1.0
        watch.step(step, {"grad_norm": 1.0} | ({} if step % 10 else {"loss": loss}))
        found += [(finding.step, finding.first_step) for finding in iter(watch.take, None)]
    assert found == [(30, 21), (80, 80)]


def blocks(losses: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    """Losses that repeat themselves, for as long as it takes to find a divergence, and change then."""
    block = st.tuples(st.lists(losses, min_size=1, max_size=5), st.integers(1, 40))
    return st.lists(block, max_size=8).map(lambda all_: [one for some, times in all_ for one in some * times])


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=25, deadline=None)
@given(
    blocks(finite | st.floats(-3, 3)),
    st.lists(st.sampled_from([None, 0.0, 0.1, 0.5]), min_size=1),
    st.integers(0, 1000),
    st.integers(0, 60),
)
def test_a_resumed_watch_finds_what_one_that_went_on_finds(
    losses: list[float], rates: list[float | None], at: int, warm_up_steps: int
) -> None:
    def run(*, resumes: bool) -> tuple[list[Finding], object]:
        rate: list[float | None] = [None]
        policy = unbroken.Health(warm_up_steps=warm_up_steps, action="warn")
        watch = HealthWatch(policy, rate=lambda: rate[0])
        found = []
        for step, loss in enumerate(losses, 1):
            rate[0] = rates[step // 50 % len(rates)]
            if resumes and step == 1 + at % len(losses):
                kept = json.loads(json.dumps(watch.state(), allow_nan=False))
                watch = HealthWatch(policy, rate=lambda: rate[0])
                watch.restore(kept)
            watch.step(step, {"loss": loss})
            while (finding := watch.take()) is not None:
                # What lasts is told once more after a resume.
                if finding.kind in ("spike", "divergence"):
                    found.append(finding)
        state: Any = watch.state()
        return found, [state[name] for name in ("losses", "spike", "divergence")]

    assert run(resumes=True) == run(resumes=False)


@settings(max_examples=25, deadline=None)
@given(blocks(st.floats() | st.floats(-3, 3)))
def test_whatever_the_numbers_are_each_finding_names_steps_in_order_and_the_state_is_json(
    losses: list[float],
) -> None:
    watch = HealthWatch(unbroken.Health(warm_up_steps=3))
    for step, loss in enumerate(losses, 1):
        for finding in found_in([loss], watch, step):
            assert 0 <= finding.trusted_step < finding.first_step <= finding.step or finding.is_over
        if step % 7 == 0:
            json.dumps(watch.state(), allow_nan=False)
