"""After a resume: the losses are compared with those before it, which leads to alarms, and back at last."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.training.health.alarmed_resumes import count_alarmed
from unbroken.training.health.policy import Health
from unbroken.training.health.resumed_losses import is_too_high, losses_before

from .loss_curves import CALM, curve
from .runs import names, words_of
from .test_after_resume import NAN, CrashError, events, falling, flat, train


@pytest.mark.parametrize(
    ("before", "after", "is_alarm"),
    [
        ([1.0], [1.4], False),
        ([1.0], [1.6], True),
        ([1.0], [0.1], False),
        ([2.0, 2.0], [3.0, 2.9], False),
        ([2.0, 2.0], [9.0, 0.1], True),
        # Below zero half as much again is upwards, too.
        ([-2.0], [-1.1], False),
        ([-2.0], [-0.9], True),
        ([-2.0], [-3.0], False),
        # A mean near zero, of losses that go up and down: their range counts.
        ([-1.0, 1.0], [0.9, 0.9], False),
        ([-1.0, 1.0], [1.2, 1.2], True),
        ([1e-9, -1e-9], [5e-10, 5e-10], False),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([1.0], [NAN], True),
        ([1.0], [math.inf], True),
    ],
)
def test_losses_after_a_resume_are_too_high_by_their_means(
    before: list[float], after: list[float], is_alarm: bool
) -> None:
    assert is_too_high(after, before, 1.5) is is_alarm


def test_the_losses_before_are_the_last_that_the_checkpoint_knows() -> None:
    def before(losses: list[Any], step: int, count: int, loss: str = "loss") -> list[float]:
        return losses_before({"loss": "loss", "losses": losses}, step, count, loss=loss)

    kept = [[step, float(step)] for step in range(1, 31)]
    assert before(kept, 30, 3) == [28.0, 29.0, 30.0]
    assert before(kept, 12, 2) == [11.0, 12.0]
    assert before(kept, 30, 99) == [float(step) for step in range(1, 31)]
    assert before([[1, "nan"], [2, NAN], [3, 0.5], "x"], 3, 10) == [0.5]
    assert before([], 3, 10) == losses_before(None, 3, 10, loss="loss") == []
    # Another metric is of another scale.
    assert before(kept, 30, 3, loss="total") == []


def high(_: int) -> float:
    return 2.0


# What else is found in losses has tests of its own.
QUIET = Health(spike="off", divergence="off", plateau="off")


def alarms(directory: Path, what: str = "resume") -> list[str]:
    return [event["text"] for event in events(directory, "alarm") if event["what"] == what]


def test_three_resumes_in_a_row_that_go_wrong_lead_back_to_the_checkpoint_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"every": 20, "health": QUIET}
    train(tmp_path, flat, until=40, **settings)
    for attempt in (2, 3):
        train(tmp_path, high, until=50, crash=True, **settings)
        assert len(alarms(tmp_path)) == attempt - 1
    assert alarms(tmp_path)[0] == (
        "after the resume from step-00000040 the first 10 losses have a mean of 2, "
        "the last 10 before it had 1; 1.5 is the limit"
    )
    with pytest.raises(SystemExit) as left:
        train(tmp_path, high, until=50, **settings)
    assert left.value.code == 75
    assert "stopped to go back; start it again" in capsys.readouterr().err
    words = words_of(tmp_path)
    assert (words.ending, words.kind, words.checkpoint) == ("stopped", "roll-back", "step-00000020")
    assert words.reason.startswith("rolled back to step-00000020: after the resume from step-00000040")
    assert alarms(tmp_path, "roll-back") == [
        f"{read_rollbacks(tmp_path)[0].reason}; back to step-00000020 (step 20), left out from there: nothing"
    ]
    (rollback,) = read_rollbacks(tmp_path)
    assert (rollback.decided_by, rollback.attempt, rollback.windows) == ("resume", 4, ())
    assert (rollback.found_step, rollback.trusted_step) == (50, 20)
    (event,) = events(tmp_path, "rolled-back")
    assert (event["step"], event["tainted"], event["in_process"]) == (20, ["step-00000040"], False)
    assert names(tmp_path) == ["step-00000020", "step-00000040"]
    # The cause is mended: it goes on as if those attempts had never been.
    capsys.readouterr()
    run = train(tmp_path, flat, until=60, **settings)
    assert run.restored is not None
    assert run.restored.checkpoint == "step-00000020"
    assert "tainted" in run.restored.passed_over["step-00000040"]
    # One is saved as soon as the place is passed that it went back for.
    assert names(tmp_path) == [f"step-000000{step}" for step in (20, 40, 51, 60)]
    assert CheckpointStore(tmp_path).get("step-00000040").manifest.rollbacks == 1


def test_there_is_no_going_back_from_the_only_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 20, "health": QUIET}
    train(tmp_path, flat, until=20, **settings)
    for _ in range(3):
        train(tmp_path, high, until=31, crash=True, **settings)
    assert "3 times in a row; there is no older checkpoint to go back to" in alarms(tmp_path)[-1]
    assert read_rollbacks(tmp_path) == ()


def test_a_resume_that_goes_well_makes_those_before_it_forgotten(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 20, "health": QUIET}
    train(tmp_path, flat, until=40, **settings)
    record = tmp_path / layout.ALARMED_RESUMES_FILE
    for loss, is_alarmed in ((high, True), (flat, False)):
        train(tmp_path, loss, until=51, crash=True, **settings)
        assert record.exists() is is_alarmed


def test_a_run_that_may_not_be_rolled_back_is_only_told_of(tmp_path: Path) -> None:
    train(tmp_path, flat, until=40, every=20)
    for _ in range(3):
        train(tmp_path, high, until=51, crash=True, every=20)
    assert "3 times in a row" in alarms(tmp_path)[-1]
    assert read_rollbacks(tmp_path) == ()


@pytest.mark.parametrize(
    ("loss", "health"),
    [
        (falling, Health(action="warn")),
        (lambda _: 1.9, Health(action="warn", resume_factor=2.0)),
        (lambda step: 5.0 if step == 45 else 1.0, Health(action="warn")),
        (high, Health(action="warn", resume_steps=0)),
    ],
)
def test_what_is_no_alarm(tmp_path: Path, loss: Callable[[int], float], health: Health) -> None:
    train(tmp_path, flat, until=40, every=20, health=health)
    train(tmp_path, loss, until=52, every=20, health=health)
    assert alarms(tmp_path) == []


def test_early_in_training_and_without_a_loss_nothing_is_compared(tmp_path: Path) -> None:
    train(tmp_path / "early", flat, until=9)
    train(tmp_path / "early", high, until=30)
    assert alarms(tmp_path / "early") == []
    other = Health(action="warn", loss="other")
    train(tmp_path / "other", flat, until=10, health=other)
    train(tmp_path / "other", high, until=20, health=other)
    assert alarms(tmp_path / "other") == []


def test_resumes_that_only_do_again_what_was_done_without_one_lead_nowhere(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 20, "health": QUIET}

    def hard(step: int) -> float:
        return 2.0 if 40 < step <= 55 else 1.0

    train(tmp_path, hard, until=58, crash=True, **settings)
    for _ in range(4):
        train(tmp_path, hard, until=52, crash=True, **settings)
    (told,) = alarms(tmp_path)
    assert "bit for bit: it is not the resume" in told
    assert read_rollbacks(tmp_path) == ()
    # From here on it is the resume, and each that does the same again is one more.
    for _ in range(2):
        train(tmp_path, lambda _: 3.0, until=52, crash=True, **settings)
    with pytest.raises(SystemExit):
        train(tmp_path, lambda _: 3.0, until=52, crash=True, **settings)
    assert [one.trusted_step for one in read_rollbacks(tmp_path)] == [20]
    assert not (tmp_path / layout.ALARMED_RESUMES_FILE).exists()


def test_losses_that_are_given_in_some_steps_only_are_compared_as_well(tmp_path: Path) -> None:
    def sparse(loss: float, until: int) -> None:
        state = {"n": 0}
        with unbroken.Run(tmp_path, state=state, health=QUIET) as run:
            while run.step_count < until:
                state["n"] += 1
                run.step(**({} if state["n"] % 5 else {"loss": loss}))

    sparse(1.0, 100)
    sparse(2.0, 149)
    assert alarms(tmp_path) == []
    sparse(2.0, 150)
    sparse(4.0, 210)
    assert len(alarms(tmp_path)) == 1


def test_another_metric_as_the_loss_is_not_measured_by_the_one_before(tmp_path: Path) -> None:
    for name, until in (("loss", 60), ("total", 120)):
        health = Health(loss=name, plateau="off")
        with unbroken.Run(tmp_path, state={"n": 0}, health=health) as run:
            while run.step_count < until:
                run.step(loss=1.0, total=64.0)
    assert events(tmp_path, "alarm") == events(tmp_path, "rolled-back") == []


def test_a_roll_back_within_the_steps_that_are_compared_ends_that(tmp_path: Path) -> None:
    def attempt(loss: Callable[[int], float], until: int) -> None:
        save, state = [unbroken.EverySteps(20)], {"n": 0}
        try:
            with unbroken.Run(tmp_path, save=save, keep=[], state=state, health=QUIET) as run:
                for _ in run.epochs(1):
                    for value in run.batches(list(range(100))):
                        run.step(loss=loss(value))
                        if run.step_count == until:
                            raise CrashError
        except CrashError:
            pass

    attempt(flat, 41)
    attempt(lambda value: NAN if value == 44 else 2.0, 55)
    assert [event["step"] for event in events(tmp_path, "rolled-back")] == [40]
    assert [event["in_process"] for event in events(tmp_path, "rolled-back")] == [True]
    assert alarms(tmp_path) == []


def test_counting_begins_anew_for_another_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    train(tmp_path / "a", flat, until=1, every=1)
    train(tmp_path / "b", flat, until=1, every=1)
    one, other = (CheckpointStore(tmp_path / run).latest() for run in "ab")
    assert one.name == other.name
    assert count_alarmed(tmp_path, one, 2, is_repeated=False).attempts == (2,)
    assert count_alarmed(tmp_path, one, 3, is_repeated=True).attempts == (2, 3)
    assert count_alarmed(tmp_path, one, 3, is_repeated=False).attempts == (2, 3)
    anew = count_alarmed(tmp_path, other, 4, is_repeated=True)
    assert (anew.attempts, anew.as_before) == ((), (4,))
    (tmp_path / layout.ALARMED_RESUMES_FILE).write_text("torn")
    assert count_alarmed(tmp_path, other, 5, is_repeated=False).attempts == (5,)


def test_trainings_that_are_well_give_next_to_no_alarm_wherever_they_are_resumed() -> None:
    def alarmed(losses: list[float], at: int) -> bool:
        return is_too_high(losses[at : at + 10], losses[at - 10 : at], 1.5)

    rng = random.Random(1)
    found = {
        name: sum(alarmed(curve(shape, seed, 600), rng.randrange(10, 590)) for seed in range(20))
        for name, shape in CALM.items()
    }
    # A bump that is as high as the loss three times over, on the way up.
    assert found.pop("early bump") <= 1
    assert sum(found.values()) == 0
    recorded = json.loads((Path(__file__).parent / "recorded_losses.json").read_text())
    for losses in recorded.values():
        assert not any(alarmed(losses, at) for at in range(10, len(losses) - 10))
