"""Tables for the pure decision: history -> restart, hold, done, stopped or hand over."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.supervisor.judging.causes import cause_of
from unbroken.supervisor.judging.verdict import Cause, Confidence, Outcome, Verdict
from unbroken.supervisor.restart_policy import Decision, Ended, RestartPolicy, decide

POLICY = RestartPolicy()


def ended(
    outcome: Outcome = "failed",
    *,
    kind: str = "RuntimeError",
    cause: Cause = "",
    message: str = "",
    confidence: Confidence = "certain",
    is_saved: bool = False,
    started: float = 0.0,
    lived: float = 5.0,
    has_words: bool = True,
    made_step: bool = True,
    checkpoint: str | None = None,
    hint: str = "",
    exit_code: int = 0,
    step: int | None = None,
    went_back: bool = False,
    rolled_back: bool = False,
) -> Ended:
    return Ended(
        verdict=Verdict(
            outcome=outcome,
            confidence=confidence,
            evidence=("seen",),
            kind=kind,
            cause=cause or cause_of(kind, message),
            message=message,
            is_saved=is_saved,
            hint=hint,
            exit_code=exit_code,
        ),
        started_seconds=started,
        lived_seconds=lived,
        has_words=has_words,
        made_step=made_step,
        checkpoint=checkpoint,
        step=step,
        went_back=went_back,
        rolled_back=rolled_back,
    )


def after(*history: Ended, policy: RestartPolicy = POLICY, **facts: Any) -> Decision:
    given = {"first_checkpoint": None, "is_stop_asked": False, "now_seconds": 100.0, "random": 1.0, **facts}
    return decide(history, policy, **given)


def different(count: int, **fields: Any) -> list[Ended]:
    return [ended(kind=f"Error{index}", **fields) for index in range(count)]


@pytest.mark.parametrize(
    ("last", "is_stop_asked", "action", "exit_code"),
    [
        (ended("completed"), False, "done", 0),
        (ended("completed"), True, "done", 0),
        (ended("completed", exit_code=3), False, "done", 3),
        (ended("completed", exit_code=3), True, "done", 3),
        (ended("stopped", is_saved=True), True, "stopped", 75),
        (ended("stopped"), True, "stopped", 143),
        (ended("killed", kind="by-supervisor"), True, "stopped", 143),
        (ended("failed"), True, "stopped", 143),
        (ended("refused"), True, "stopped", 143),
        (ended("unkillable"), True, "hold", 78),
        (ended("unkillable"), False, "hold", 78),
        (ended("refused"), False, "hold", 78),
        (ended("not-started"), False, "hold", 78),
        (ended("failed"), False, "restart", None),
        (ended("signalled"), False, "restart", None),
        (ended("killed"), False, "restart", None),
        (ended("vanished"), False, "restart", None),
        (ended("stopped", is_saved=True), False, "restart", None),
    ],
)
def test_the_first_end_decides_by_its_outcome(
    last: Ended, is_stop_asked: bool, action: str, exit_code: int | None
) -> None:
    decision = after(last, is_stop_asked=is_stop_asked)
    assert (decision.action, decision.exit_code) == (action, exit_code)
    assert decision.reason


def test_an_exception_before_anything_ever_worked_is_not_restarted() -> None:
    typo = ended(kind="NameError", made_step=False)
    assert after(typo).action == "hold"
    assert after(ended(kind="my.lib.NameError", made_step=False, confidence="likely")).action == "hold"
    assert after(ended(kind="NameError", made_step=True)).action == "restart"
    assert after(ended("signalled", kind="SIGSEGV", made_step=False)).action == "restart"


def test_an_exception_before_the_first_step_is_restarted_if_anything_worked_before() -> None:
    early = ended(kind="NameError", made_step=False)
    assert after(ended("killed", made_step=True), early).action == "restart"
    from_checkpoint = ended(kind="NameError", made_step=False, checkpoint="step-00000005")
    assert after(from_checkpoint, first_checkpoint="step-00000005").action == "restart"


def test_an_exception_of_the_outside_world_is_restarted_even_before_the_first_step() -> None:
    assert after(ended(kind="ConnectionResetError", made_step=False)).action == "restart"
    assert after(ended(kind="urllib.error.URLError", made_step=False)).action == "restart"
    assert after(ended(kind="FileNotFoundError", made_step=False)).action == "hold"
    typo = ended(kind="OSError", message="gtp2 is not a valid model identifier", made_step=False)
    assert after(typo).action == "hold"
    assert (
        after(ended(kind="HTTPError", message="HTTP Error 404: Not Found", made_step=False)).action == "hold"
    )


def test_an_exit_code_alone_is_no_proof_of_a_typo() -> None:
    bare = ended(kind="exit-1", confidence="unknown", has_words=False, made_step=False)
    assert after(bare).action == "restart"
    assert after(bare, bare).action == "hold"


def test_a_command_without_the_library_has_worked_if_it_lived_for_a_minute() -> None:
    without = {"kind": "ValueError", "has_words": False, "made_step": False, "confidence": "likely"}
    assert after(ended(lived=59.0, **without)).action == "hold"
    assert after(ended(lived=61.0, **without)).action == "restart"
    with_words = {**without, "has_words": True}
    assert after(ended(lived=61.0, **with_words)).action == "hold"


@pytest.mark.parametrize(
    ("outcome", "allowed"), [("failed", 1), ("signalled", 2), ("killed", 2), ("vanished", 2)]
)
def test_the_same_end_in_a_row_without_progress_is_held(outcome: Outcome, allowed: int) -> None:
    same = [ended(outcome)] * (allowed + 1)
    assert after(*same[:-1]).action == "restart"
    assert after(*same).action == "hold"


def test_another_end_in_between_breaks_the_row() -> None:
    a, b = ended("killed", kind="SIGKILL"), ended("signalled", kind="SIGSEGV")
    assert after(a, a, b, a, b).action == "restart"


def test_numbers_in_a_message_do_not_make_it_another_failure() -> None:
    first, second = (ended(message=f"loss is nan at step {step}") for step in (41, 57))
    assert after(first, second).action == "hold"


def test_more_than_five_failures_without_progress_are_held() -> None:
    assert after(*different(5)).action == "restart"
    assert after(*different(6)).action == "hold"


def test_only_a_newer_checkpoint_makes_failures_forgotten() -> None:
    same = [ended(checkpoint=f"step-0000000{step}") for step in (1, 2, 3, 4)]
    assert after(*same).action == "restart"
    assert after(*same, ended(checkpoint="step-00000004")).action == "hold"


def test_a_checkpoint_that_was_there_before_is_no_progress() -> None:
    stuck = [ended(checkpoint="step-00000009"), ended(checkpoint="step-00000009")]
    assert after(*stuck, first_checkpoint="step-00000009").action == "hold"
    assert after(*stuck[:1], first_checkpoint="step-00000009").delay_seconds == 1.0


def test_going_back_to_an_older_checkpoint_and_up_again_is_no_progress() -> None:
    names = ("step-00000010", "step-00000005", "step-00000008")
    history = [ended("killed", checkpoint=name) for name in names]
    assert after(*history, first_checkpoint="step-00000009").action == "hold"


def test_checkpoints_are_compared_as_numbers_not_as_text() -> None:
    history = [ended(checkpoint="step-99999999"), ended(checkpoint="step-100000000")]
    assert after(*history).action == "restart"


def test_twenty_starts_in_an_hour_are_enough_whatever_for() -> None:
    stops = [
        ended("stopped", is_saved=True, started=60.0 * n, checkpoint=f"step-{n + 1:08d}") for n in range(20)
    ]
    assert after(*stops[:19], now_seconds=19 * 60.0).action == "restart"
    assert after(*stops, now_seconds=20 * 60.0).action == "hold"
    assert after(*stops, now_seconds=3600.0 + 60.0).action == "restart"


def test_restarts_in_all_can_be_limited() -> None:
    none, one = RestartPolicy(max_restarts=0), RestartPolicy(max_restarts=1)
    assert after(ended(), policy=none).action == "hold"
    assert after(ended(), policy=one).action == "restart"
    assert after(*different(2), policy=one).action == "hold"


def test_a_stop_nobody_asked_for_is_restarted_at_once_and_free_of_charge() -> None:
    stop = ended("stopped", is_saved=True)
    decision = after(*different(2), stop)
    assert (decision.action, decision.delay_seconds) == ("restart", 0.0)
    assert after(*different(5), stop, ended("killed")).action == "hold"
    assert after(*different(4), stop, ended("killed")).action == "restart"


def test_stops_that_lead_nowhere_are_handed_over() -> None:
    stop = ended("stopped", is_saved=True)
    assert after(stop, stop, stop).action == "restart"
    decision = after(stop, stop, stop, stop)
    assert (decision.action, decision.exit_code) == ("hand-over", 75)
    moving = [ended("stopped", is_saved=True, checkpoint=f"step-0000000{n}") for n in range(1, 8)]
    assert after(*moving).action == "restart"


def test_the_pause_doubles_up_to_a_limit_and_is_spread_by_chance() -> None:
    pauses = [after(*different(count)).delay_seconds for count in (1, 2, 3, 4, 5)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert after(*different(3), random=0.0).delay_seconds == 2.0
    patient = RestartPolicy(max_failures=10_000, max_starts_per_hour=10_000, base_seconds=2.0)
    assert after(*different(2000), policy=patient).delay_seconds == 600.0


def test_the_pause_starts_again_after_progress() -> None:
    history = [*different(3), ended(kind="Other", checkpoint="step-00000005")]
    assert after(*history).delay_seconds == 1.0


@pytest.mark.parametrize(
    ("action", "history", "policy"),
    [
        ("hold", [ended("refused", hint="do this")], POLICY),
        ("hold", [ended(kind="NameError", made_step=False, hint="do this")], POLICY),
        ("hold", [ended(hint="something else"), ended(hint="do this")], POLICY),
        ("hold", [*different(5), ended(kind="Last", hint="do this")], POLICY),
        ("hold", [ended(hint="do this")], RestartPolicy(max_restarts=0)),
        ("restart", [ended(hint="do this")], POLICY),
    ],
)
def test_whatever_is_decided_the_hint_of_the_last_attempt_goes_with_it(
    action: str, history: list[Ended], policy: RestartPolicy
) -> None:
    decision = after(*history, policy=policy)
    assert (decision.action, decision.hint) == (action, "do this")


def test_a_run_that_fails_at_the_same_step_is_held_naming_it_and_one_that_gets_farther_goes_on() -> None:
    at_seven = after(ended(step=7), ended(step=7))
    assert at_seven.action == "hold"
    assert "2 times in a row at step 7" in at_seven.reason
    assert after(*[ended(step=step) for step in (10, 20, 30, 40)]).action == "restart"
    # Not farther than before.
    assert after(ended(step=20), ended(step=30), ended(step=25)).action == "hold"
    # Getting farther has its limit too, without a checkpoint.
    assert after(*[ended(step=step) for step in (10, 20, 30, 40, 50, 60)]).action == "hold"


def test_two_failures_before_the_first_step_are_enough() -> None:
    early: dict[str, Any] = {"made_step": False}
    first, second = ended("signalled", kind="SIGSEGV", **early), ended("killed", kind="SIGKILL", **early)
    assert after(first).action == "restart"
    held = after(first, second)
    assert held.action == "hold"
    assert "2 times before its first step" in held.reason
    assert after(first, second, ended("killed")).action == "restart"
    # A command without the library reports no steps.
    without: dict[str, Any] = {"made_step": False, "has_words": False}
    assert after(ended("signalled", **without), ended("killed", **without)).action == "restart"


@pytest.mark.parametrize(
    ("outcome", "cause", "allowed"),
    [
        ("killed", "memory", 1),
        ("failed", "memory", 1),
        ("failed", "device-memory", 1),
        ("signalled", "shared-memory", 1),
        ("failed", "read-only", 1),
        ("hung", "", 1),
        ("lost", "", 2),
        ("failed", "device", 2),
        ("failed", "collective", 2),
        ("failed", "network", 20),
        ("failed", "disk-full", 20),
        ("failed", "storage", 20),
    ],
)
def test_what_may_pass_by_itself_is_tried_longer_than_what_is_the_runs_own_fault(
    outcome: Outcome, cause: Cause, allowed: int
) -> None:
    patient = RestartPolicy(max_starts_per_hour=1000)
    same = [ended(outcome, cause=cause)] * (allowed + 1)
    assert after(*same[:-1], policy=patient).action == "restart"
    assert after(*same, policy=patient).action == "hold"


@pytest.mark.parametrize("cause", ["memory", "device-memory", "network", "disk-full"])
def test_what_runs_out_before_the_first_step_is_no_typo(cause: Cause) -> None:
    assert after(ended(cause=cause, made_step=False)).action == "restart"


def test_failures_of_the_network_and_of_the_script_have_budgets_of_their_own() -> None:
    network = [ended(cause="network")] * 10
    assert after(*network, *different(5)).action == "restart"
    assert after(*different(5), *network).action == "restart"
    assert after(*network, *different(6)).action == "hold"


def test_a_machine_that_was_started_again_costs_nothing_until_it_leads_nowhere() -> None:
    boot = ended("lost", cause="reboot")
    decision = after(*different(2), boot)
    assert (decision.action, decision.delay_seconds) == ("restart", 0.0)
    assert after(*different(4), boot, ended("killed")).action == "restart"
    held = after(boot, boot, boot, boot)
    assert held.action == "hold"
    assert "started again 4 times" in held.reason
    moving = [ended("lost", cause="reboot", checkpoint=f"step-0000000{n}") for n in range(1, 8)]
    assert after(*moving).action == "restart"


def test_the_pause_after_failures_of_all_kinds_grows_with_each() -> None:
    assert after(*different(2), ended(cause="network")).delay_seconds == 4.0


def test_a_program_that_was_there_before_gets_the_time_for_its_disk_to_come_back() -> None:
    missing = ended("not-started", kind="FileNotFoundError")
    assert after(missing).action == "hold"
    later = after(ended("lost", cause="reboot"), *[missing] * 10)
    assert later.action == "restart"
    assert later.delay_seconds > 60
    assert "program was there before" in later.hint
    assert after(ended("lost", cause="reboot"), ended("not-started", kind="OSError")).action == "hold"
