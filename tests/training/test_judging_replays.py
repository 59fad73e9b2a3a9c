"""What a replay shows, from the recorded losses and those of the steps that were done again."""

from __future__ import annotations

import pytest

from unbroken.training.health.judging_replays import compare, samples_in_words, verdict

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("recorded", "replayed", "is_bad_again", "same", "equal_steps"),
    [
        ({8: 1.0, 9: NAN}, {8: 1.0, 9: NAN}, None, True, 2),
        ({8: 1.0, 9: NAN}, {8: 1.0, 9: INFINITY}, None, True, 1),
        ({8: 1.0, 9: NAN}, {8: 1.0, 9: 0.5}, None, False, 1),
        ({8: 1.0, 9: 812.4}, {8: 1.0, 9: 0.5}, None, False, 1),
        ({8: 1.0, 9: 812.4}, {8: 1.0000001, 9: 812.3}, None, True, 0),
        ({8: 0.0, 9: 0.0}, {8: 0.0, 9: 0.0}, None, True, 2),
        ({8: 1.0, 9: 0.5}, {8: 1.0, 9: 0.5}, False, False, 2),
        ({8: 1.0, 9: 0.5}, {8: 1.0, 9: 0.6}, True, True, 1),
        ({8: 1.0, 9: 900.0}, {8: 1.0, 9: 90.0}, None, True, 1),
        ({8: 1.0, 9: 900.0}, {8: 1.0, 9: 4.9}, None, False, 1),
        ({8: 1.0, 9: 900.0}, {8: 1.0, 9: NAN}, None, True, 1),
        ({8: 1.0}, {8: 1.0, 9: 0.5}, None, None, 1),
        ({8: 1.0}, {8: 1.0, 9: 0.5}, True, True, 1),
        ({8: 1.0, 9: NAN}, {8: 1.0}, True, None, 1),
    ],
)
def test_the_bad_step_is_the_same_or_not_and_equal_steps_are_counted(
    recorded: dict[int, float],
    replayed: dict[int, float],
    is_bad_again: bool | None,
    same: bool | None,
    equal_steps: int,
) -> None:
    found = compare(9, recorded, replayed, metric="loss", is_bad_again=is_bad_again, limit=5.0)

    assert (found.same, found.equal_steps) == (same, equal_steps)
    assert found.compared_steps == len(recorded.keys() & replayed.keys())


def test_the_same_bad_loss_points_to_data_or_optimization() -> None:
    found = compare(9, {8: 1.0, 9: NAN}, {8: 1.0, 9: NAN}, metric="loss", is_bad_again=None)

    text, hint = verdict(found, "step-00000007", may_vary=True)

    assert text.startswith("step 9, done again from step-00000007, is as bad as it was (loss nan, ")
    assert text.endswith("the data or the optimization is the cause, not the hardware")
    assert "samples" in hint


@pytest.mark.parametrize("may_vary", [False, True])
def test_another_loss_after_equal_steps_points_to_the_hardware_and_to_kernels_if_those_vary(
    may_vary: bool,
) -> None:
    # Kernels that vary give other last digits.
    recorded, replayed = {7: 2.0, 8: 1.0, 9: 500.0}, {7: 2.0, 8: 1.0 + may_vary / 1e6, 9: 1.25}
    found = compare(9, recorded, replayed, metric="nll", is_bad_again=None, may_vary=may_vary)

    text, hint = verdict(found, "step-00000006", may_vary=may_vary)

    assert found.strays is None
    assert found.first_difference is not None
    assert found.first_difference["step"] == (8 if may_vary else 9)
    assert "is not the same (loss 1.25, recorded 500), and the 2 steps before it came out as recorded" in text
    assert text.endswith("kernels whose results vary" if may_vary else "points to the hardware")
    assert ("use_deterministic_algorithms" in hint) == may_vary


@pytest.mark.parametrize(("off_by", "may_vary"), [(1e-6, False), (0.5, False), (0.5, True)])
def test_where_a_good_step_is_another_the_step_function_is_suspected_first(
    off_by: float, may_vary: bool
) -> None:
    recorded, replayed = {7: 2.0, 8: 1.0, 9: 500.0}, {7: 2.0, 8: 1.0 + off_by, 9: 1.25}
    found = compare(9, recorded, replayed, metric="nll", is_bad_again=None, may_vary=may_vary)

    text, hint = verdict(found, "step-00000006", may_vary=may_vary)

    assert found.strays == {"step": 8, "metric": "nll", "here": 1.0 + off_by, "there": 1.0}
    assert "but neither is step 8 before it, which was well" in text
    assert text.index("the function given as replay= does not do what the loop does") < text.index("hardware")
    assert "make sure that the function given as replay=" in hint


@pytest.mark.parametrize(
    ("recorded", "said"), [({9: 500.0}, "not the same"), ({9: 1.25}, "finite"), ({}, "finite")]
)
def test_where_no_other_step_can_be_compared_nobody_is_accused_alone(
    recorded: dict[int, float], said: str
) -> None:
    found = compare(9, recorded, {8: 1.0, 9: 1.25}, metric="loss", is_bad_again=False)

    text, _ = verdict(found, "step-00000006", may_vary=False)

    assert f"is {said}" in text
    assert "that is the hardware, or the function given as replay=" in text


def test_a_step_that_nobody_recorded_says_nothing() -> None:
    found = compare(9, {}, {9: 1.0}, metric="loss", is_bad_again=None)

    assert verdict(found, "step-00000006", may_vary=False)[0].endswith("no recorded loss to compare with")


def test_only_the_first_samples_are_named() -> None:
    assert samples_in_words([3, 1]) == "3, 1"
    assert samples_in_words(range(11)) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
