"""How far a run goes back and what it leaves out: decided without acting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unbroken import Health, KeepLast
from unbroken.checkpoint.retention import CheckpointFacts
from unbroken.rundir.rollbacks import LowerRate, Rollback, Window
from unbroken.training.consumption import Consumption, merged
from unbroken.training.health.findings import Finding
from unbroken.training.health.going_back import MOST_STEPS_MORE, GoBack, Kept, Refusal, decide
from unbroken.training.health.keeping import LOOK_BACK_STEPS, with_one_to_go_back_to
from unbroken.training.leaving_out import last_left_out

NAN = "not finite: model.weight"


def finding(step: int, first_step: int | None = None) -> Finding:
    first = step if first_step is None else first_step
    return Finding(
        kind="non-finite", step=step, first_step=first, trusted_step=first - 1, text="bad", action="roll-back"
    )


def kept(*steps: int, earlier: int = 0, against: str | None = None) -> list[Kept]:
    return [
        Kept(name=f"step-{step}", step=step, earlier=earlier, against=against, is_finite=against != NAN)
        for step in steps
    ]


def gone_back(found_step: int, trusted_step: int, in_a_row: int = 1) -> Rollback:
    return Rollback(
        decided_by="health",
        reason="bad",
        attempt=1,
        found_step=found_step,
        trusted_step=trusted_step,
        in_a_row=in_a_row,
    )


def decided(found: Finding, checkpoints: list[Kept], *rollbacks: Rollback, **health: Any) -> Any:
    consumption = Consumption()
    for step in range(1, 50):
        consumption.note_batch((0, 0), step - 1)
        consumption.note_step(step, [(0, 0)])
    return decide(
        found,
        rollbacks=rollbacks,
        kept=checkpoints,
        windows=consumption.windows,
        policy=Health(**health),
        attempt=1,
    )


def test_the_newest_good_checkpoint_from_before_the_trouble_is_gone_back_to() -> None:
    checkpoints = [*kept(3, 6), *kept(8, against="not validated: too bad"), *kept(9, 12)]
    found = decided(finding(11, 9), checkpoints)
    assert found.targets == ("step-6", "step-3")
    assert found.rollback.trusted_step == 8
    assert found.rollback.windows == (Window(epoch=0, pass_index=0, first=8, last=10),)


def test_going_back_once_more_for_one_place_goes_farther_and_leaves_out_more() -> None:
    first = gone_back(11, 8)
    found = decided(finding(11, 10), [*kept(3, 6), *kept(9, earlier=1)], first)
    assert found.targets == ("step-3",)
    assert (found.rollback.trusted_step, found.rollback.in_a_row) == (3, 2)
    assert found.rollback.windows == (Window(epoch=0, pass_index=0, first=7, last=12),)


def test_without_an_older_checkpoint_the_same_one_is_gone_back_to_again() -> None:
    found = decided(finding(11), kept(6), gone_back(11, 8))
    assert (found.targets, found.rollback.trusted_step, found.rollback.in_a_row) == (("step-6",), 10, 2)


def test_trouble_behind_the_place_and_as_many_steps_as_were_left_out_is_trouble_of_its_own() -> None:
    window = Window(epoch=0, pass_index=0, first=8, last=10)
    last = replace(gone_back(11, 8, in_a_row=2), windows=(window,), left_out_steps=3)
    at_the_place = decided(finding(14), kept(6), last)
    assert (at_the_place.rollback.in_a_row, at_the_place.rollback.windows[0].first) == (3, 10)
    behind_it = decided(finding(15), kept(6), last)
    assert behind_it.rollback.in_a_row == 1
    assert behind_it.rollback.windows == (replace(window, first=14, last=14),)
    assert [one.rollback.left_out_steps for one in (at_the_place, behind_it)] == [7, 1]
    # What counts is where the trouble began.
    assert decided(finding(20, 14), kept(6), last).rollback.in_a_row == 3


def test_however_long_the_trouble_lasted_no_more_than_some_steps_are_left_out_besides() -> None:
    found = decided(finding(39, 20), kept(6), gone_back(39, 6, in_a_row=2))
    (window,) = found.rollback.windows
    assert (window.first, window.last) == (19 - MOST_STEPS_MORE, 38 + MOST_STEPS_MORE)


def test_the_step_that_led_to_a_state_that_is_not_finite_is_the_one_left_out() -> None:
    # The loss shows the weights of the step before.
    found = decided(finding(12), [*kept(9, 10), *kept(11, against=NAN)])
    assert found.targets == ("step-10", "step-9")
    assert found.rollback.trusted_step == 10
    assert found.rollback.windows == (Window(epoch=0, pass_index=0, first=10, last=10),)


def test_the_budget_is_of_roll_backs_in_a_row() -> None:
    refused = decided(finding(11), kept(6), gone_back(9, 8), gone_back(11, 6, in_a_row=2), max_rollbacks=2)
    assert isinstance(refused, Refusal)
    assert (
        refused.reason
        == "rolled back 2 times in a row already (found at step 9, 11), without getting past it"
    )
    assert isinstance(decided(finding(11), kept(6), max_rollbacks=0), Refusal)


def test_there_is_a_budget_of_the_last_thousand_steps_too() -> None:
    rollbacks = [gone_back(step, step) for step in range(100, 1300, 100)]
    checkpoints = kept(1090, earlier=12)
    refused = decided(finding(1099), checkpoints, *rollbacks)
    assert isinstance(refused, Refusal)
    assert refused.reason == "rolled back 12 times in the last 1000 steps already"
    assert isinstance(decided(finding(1300), checkpoints, *rollbacks), GoBack)
    assert isinstance(decided(finding(1099), kept(1050, earlier=12), *rollbacks, max_rollbacks=4), GoBack)


def test_that_batches_at_one_place_are_left_out_in_each_epoch_is_said() -> None:
    def left_out(epoch: int, first: int, last: int, pass_index: int = 0) -> Rollback:
        window = Window(epoch=epoch, pass_index=pass_index, first=first, last=last)
        return replace(gone_back(1, 9), windows=(window,))

    consumption = Consumption()
    consumption.note_batch((2, 0), 7)
    consumption.note_step(11, [(2, 0)])

    def reason(*rollbacks: Rollback) -> str:
        found = decide(
            finding(11),
            rollbacks=rollbacks,
            kept=kept(9, earlier=len(rollbacks)),
            windows=consumption.windows,
            policy=Health(),
            attempt=1,
        )
        assert isinstance(found, GoBack)
        return found.rollback.reason

    assert reason(left_out(0, 5, 6), left_out(1, 7, 7, pass_index=1), left_out(2, 7, 7)) == "bad"
    assert reason(left_out(0, 6, 7), left_out(0, 7, 9), left_out(1, 7, 7)) == (
        "bad; batches at this place were left out in 2 epochs before this one, too"
    )


def test_a_run_that_never_saved_begins_anew_and_one_whose_good_checkpoints_are_gone_does_not() -> None:
    anew = decided(finding(11), [])
    assert isinstance(anew, GoBack)
    assert (anew.targets, anew.rollback.trusted_step) == ((), 0)
    late = decided(finding(11, 4), kept(6, 9))
    assert isinstance(late, Refusal)
    assert late.reason == "no good checkpoint is of step 3 or before, the oldest good one is step-6"
    bad = decided(finding(11, 4), [*kept(3, against=NAN), *kept(6, against=NAN), *kept(9)])
    assert bad.reason.endswith(f", the oldest good one is step-9; step-3 is {NAN}")
    assert bad.hint.endswith("start the script by itself with resume='step-9'")
    none = decided(finding(11, 4), kept(3, against="not validated: too bad"))
    assert none.reason.endswith(", and none is good; step-3 is not validated: too bad")
    assert none.hint.startswith("look at what is said against it: validate= and non_finite= of Run")


def test_the_rate_is_lowered_from_the_checkpoint_on() -> None:
    found = decided(finding(11), kept(6), rate_factor=0.5, rate_steps=20)
    assert found.rollback.lower_rate == LowerRate(factor=0.5, from_step=6, until_step=26)
    assert decided(finding(11), kept(6)).rollback.lower_rate is None


def noted(*events: tuple[int, int, int] | int) -> Consumption:
    """Return what is known of batches (epoch, pass, number) and of steps, counted by themselves."""
    found, step = Consumption(), 0
    open_pass = (0, 0)
    for event in events:
        if isinstance(event, int):
            step += 1
            found.note_step(step, [open_pass])
        else:
            open_pass = event[:2]
            found.note_batch(open_pass, event[2])
    return found


def test_a_step_takes_all_batches_since_the_one_before_across_passes_and_epochs() -> None:
    found = noted((0, 0, 0), (0, 0, 1), 1, (0, 0, 2), (0, 0, 3), 2, (0, 0, 4), (1, 0, 0), 3, (1, 0, 1), 4)
    assert found.windows(2, 2) == (Window(epoch=0, pass_index=0, first=2, last=3),)
    spanning = (
        Window(epoch=0, pass_index=0, first=4, last=4),
        Window(epoch=1, pass_index=0, first=0, last=0),
    )
    assert found.windows(3, 3) == spanning
    assert found.windows(1, 4) == (
        Window(epoch=0, pass_index=0, first=0, last=4),
        Window(epoch=1, pass_index=0, first=0, last=1),
    )
    assert found.windows(5, 9) == ()


def test_batches_of_an_evaluation_belong_to_no_step() -> None:
    found = Consumption()
    found.note_batch((0, 0), 0)
    found.note_step(1, [(0, 0)])
    found.note_batch((0, 1), 0)
    found.note_batch((0, 2), 0)
    found.note_step(2, [(0, 2)])
    assert found.windows(2, 2) == (Window(epoch=0, pass_index=2, first=0, last=0),)


def test_what_went_into_steps_outlives_a_resume_and_stays_small() -> None:
    found = noted(*[event for number in range(500) for event in ((0, 0, number), 1)], (0, 0, 500))
    assert len(found.state()) == 2
    again = Consumption()
    again.restore(found.state())
    again.note_batch((1, 0), 0)
    again.note_step(501, [(1, 0)])
    assert again.windows(500, 501) == (
        Window(epoch=0, pass_index=0, first=499, last=500),
        Window(epoch=1, pass_index=0, first=0, last=0),
    )


def test_windows_that_touch_are_one() -> None:
    def windows(*pairs: tuple[int, int]) -> list[Window]:
        return [Window(epoch=0, pass_index=0, first=first, last=last) for first, last in pairs]

    assert merged(windows((5, 6), (1, 2), (3, 5))) == tuple(windows((1, 6)))
    places = [last_left_out(windows((4, 5), (1, 2), (3, 3)), (0, 0), number) for number in (0, 1, 3, 5, 6)]
    assert places == [None, 5, 5, 5, None]
    assert last_left_out(windows((1, 2)), (1, 0), 1) is None


def test_retention_always_leaves_a_checkpoint_of_long_enough_ago_and_not_much_longer() -> None:
    def facts(step: int) -> CheckpointFacts:
        created: Any = None
        return CheckpointFacts(name=f"step-{step}", step=step, created=created)

    assert with_one_to_go_back_to((KeepLast(1),), Health(action="warn")) == (KeepLast(1),)
    assert with_one_to_go_back_to((), Health()) == ()
    _, policy = with_one_to_go_back_to((KeepLast(1),), Health())
    assert policy.keeps([]) == {}
    for every in (10, 100, 300, 700, 1500):
        left = [facts(0)]
        for newest in range(every, 10_000, every):
            left.append(facts(newest))
            left = [one for one in left if one == left[-1] or one.name in policy.keeps(left)]
            assert len(left) <= 3
            oldest = left[0].step
            # What was there before so many steps, or what follows it.
            assert min(newest - oldest, newest) <= 2 * LOOK_BACK_STEPS + 2 * every
            assert oldest == 0 or newest - oldest >= LOOK_BACK_STEPS


# A state is saved behind a step, or at the end of an epoch.
@pytest.mark.parametrize("cut", [3, 7, 8, 11, 15, 17, 19, 23])
def test_which_batches_went_into_steps_is_known_after_a_resume_as_without_one(cut: int) -> None:
    def trained(cut: int | None) -> list[list[int]]:
        consumption = Consumption()
        for batch in range(27):
            epoch, number = divmod(batch, 9)
            consumption.note_batch((epoch, 0), number)
            # Four batches a step, the last of an epoch carried over into the next.
            if batch % 4 == 3:
                consumption.note_step(batch // 4 + 1, [(epoch, 0)])
            if batch == cut:
                state, consumption = consumption.state(), Consumption()
                consumption.restore(state)
        return consumption.state()

    assert trained(cut) == trained(None)
