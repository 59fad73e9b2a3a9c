"""Tables for the pure decision where a run goes back, by itself or by its supervisor."""

from __future__ import annotations

import dataclasses
from typing import Any

from unbroken.supervisor.restart_policy import Ended, RestartPolicy, may_roll_back

from .test_restart_policy import POLICY, after, different, ended


def not_finite(**fields: Any) -> Ended:
    given = {"step": 7, "checkpoint": "step-00000006", **fields}
    return ended(kind="FloatingPointError", message="loss is nan", **given)


def going_back(**fields: Any) -> Ended:
    return ended(
        "stopped",
        kind="roll-back",
        message="rolled back to step-00000004: loss 812.4",
        is_saved=True,
        **fields,
    )


def test_numbers_that_are_not_finite_twice_from_one_checkpoint_lead_to_the_one_before() -> None:
    first = after(not_finite(), older="step-00000004")
    assert (first.action, first.back_to) == ("restart", None)
    second = after(not_finite(), not_finite(), older="step-00000004")
    assert (second.action, second.back_to, second.exit_code) == ("roll-back", "step-00000004", None)
    assert second.goes_on
    assert second.delay_seconds == 0.0
    assert second.reason == "rolled back to step-00000004: loss is nan, 2 times in a row, at step 7"


def test_nothing_is_rolled_back_where_that_could_not_help() -> None:
    assert after(not_finite(), not_finite()).action == "hold"
    farther = not_finite(step=9)
    assert after(not_finite(), farther, older="step-00000004").action == "restart"
    newer = not_finite(step=9, checkpoint="step-00000008")
    assert after(not_finite(), newer, older="step-00000004").action == "restart"
    other = ended(kind="KeyError", checkpoint="step-00000006")
    assert after(other, other, older="step-00000004").action == "hold"
    assert after(not_finite(), other, older="step-00000004").action == "restart"
    typo = not_finite(checkpoint=None, made_step=False, step=0)
    assert after(typo, typo, older="step-00000004").action == "hold"
    asked = after(not_finite(), not_finite(), older="step-00000004", is_stop_asked=True)
    assert asked.action == "stopped"


def test_after_three_roll_backs_in_a_row_the_run_is_held() -> None:
    back = not_finite(rolled_back=True)
    history = [not_finite(), back, back, not_finite()]
    assert after(*history, older="step-00000001").action == "roll-back"
    held = after(not_finite(), back, back, back, not_finite(), older="step-00000001")
    assert held.action == "hold"
    assert "5 times in a row at step 7" in held.reason
    assert "rolled back 3 times" in held.reason
    past_it = not_finite(checkpoint="step-00000008", step=9)
    again = after(not_finite(), back, back, back, past_it, past_it, older="step-00000006")
    assert again.action == "roll-back"


def test_whether_there_is_an_older_checkpoint_is_asked_only_where_that_decides() -> None:
    assert may_roll_back([not_finite(), not_finite()], POLICY, first_checkpoint=None)
    assert not may_roll_back([not_finite()], POLICY, first_checkpoint=None)
    assert not may_roll_back([ended(), ended()], POLICY, first_checkpoint=None)
    assert not may_roll_back([going_back(), going_back()], POLICY, first_checkpoint=None)


def test_a_run_that_stopped_to_go_back_is_started_again_at_once_and_free_of_charge() -> None:
    decision = after(*different(4, made_step=True), going_back())
    assert (decision.action, decision.delay_seconds, decision.back_to) == ("roll-back", 0.0, None)
    assert decision.reason == "rolled back to step-00000004: loss 812.4"
    assert after(*[going_back()] * 3).action == "roll-back"
    held = after(*[going_back()] * 4)
    assert (held.action, held.exit_code) == ("hold", 78)
    assert "4 times in a row without a newer checkpoint" in held.reason
    assert "loss 812.4" in held.reason
    moving = [going_back(checkpoint=f"step-0000000{n}") for n in range(1, 8)]
    assert after(*moving).action == "roll-back"
    assert after(going_back(), policy=RestartPolicy(max_starts_per_hour=1)).action == "hold"


def test_a_run_that_says_that_it_is_not_well_is_held_with_its_own_words() -> None:
    decision = after(ended("refused", kind="unhealthy", message="step 9: loss 812.4; rolled back 3 times"))
    assert (decision.action, decision.reason) == ("hold", "step 9: loss 812.4; rolled back 3 times")


def to_500(last: Ended, **fields: Any) -> Ended:
    """The last attempt before a roll-back to step 500."""
    return dataclasses.replace(last, checkpoint="step-00000500", went_back=True, **fields)


def since_500(*steps: int, **fields: Any) -> list[Ended]:
    return [ended(**{"checkpoint": f"step-{step:08d}", "step": step + 5, **fields}) for step in steps]


BAD = not_finite(step=1010, checkpoint="step-00001000")
AGAIN = to_500(BAD, rolled_back=True)


def test_after_a_roll_back_what_is_newer_than_where_it_led_to_is_progress() -> None:
    stops = since_500(600, 700, 800, 900, outcome="stopped", is_saved=True)
    for before in ([BAD, AGAIN], [to_500(going_back())]):
        assert after(*before, *stops).action == "restart"
        assert after(*before, *[stops[0]] * 5).action == "hand-over"
        killed = since_500(600, 700, 800, 900, outcome="killed", kind="SIGKILL")
        assert after(*before, *killed).action == "restart"
        assert after(*before, *[killed[0]] * 4).action == "hold"
    # So it is where the run went back without ending.
    in_process = [
        ended("killed", checkpoint="step-00001000"),
        *since_500(600, went_back=True, outcome="killed"),
    ]
    assert after(*in_process, *since_500(700, 800, 900, outcome="killed")).action == "restart"
    assert after(*in_process, *since_500(600, 600, outcome="killed")).action == "hold"


def test_what_is_saved_anew_before_the_same_end_does_not_make_roll_backs_forgotten() -> None:
    anew = not_finite(step=1010, checkpoint="step-00001000")
    history = [BAD, AGAIN]
    for back_to in ("step-00000400", "step-00000300"):
        assert after(*history, anew, older=back_to).action == "restart"
        decision = after(*history, anew, anew, older=back_to)
        assert (decision.action, decision.back_to) == ("roll-back", back_to)
        back = dataclasses.replace(anew, checkpoint=back_to, went_back=True, rolled_back=True)
        history += [anew, back]
    held = after(*history, anew, anew, older="step-00000200")
    assert held.action == "hold"
    assert "rolled back 3 times" in held.reason
    assert not may_roll_back([*history, anew, anew], POLICY, first_checkpoint=None)


def test_a_run_that_goes_back_and_forth_is_held() -> None:
    forth = [going_back(checkpoint=f"step-{step:08d}", went_back=True) for step in (900, 500, 800, 400)]
    assert after(*forth[:3]).action == "roll-back"
    assert after(*forth).action == "hold"
