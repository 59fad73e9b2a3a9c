"""What the user says about health, and what is told: once, and again when it is over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UnhealthyError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.training.health.findings import Finding
from unbroken.training.health.policy import Action, Kind
from unbroken.training.health.watch import HealthWatch

from .runs import names, words_of


def told_of(watch: HealthWatch, step: int, **values: float) -> list[Finding]:
    watch.step(step, values)
    found = []
    while (finding := watch.take()) is not None:
        found.append(finding)
    return found


def alarms(directory: Path) -> list[dict[str, Any]]:
    return [
        event
        for number in layout.attempts(directory)
        for event in read_events(layout.attempt_directory(directory, number) / layout.ALARMS_FILE)
    ]


def test_what_is_done_is_said_for_all_kinds_or_for_each() -> None:
    kinds: list[Kind] = ["non-finite", "spike", "divergence", "plateau", "zero-rate"]

    def actions(policy: unbroken.Health) -> list[Action]:
        return [policy.action_for(kind) for kind in kinds]

    assert actions(unbroken.Health()) == [*["roll-back"] * 3, "warn", "warn"]
    assert actions(unbroken.Health(action="stop")) == ["stop"] * 5
    assert actions(unbroken.Health(action="off", spike="warn")) == ["off", "warn", "off", "off", "off"]
    # Where going back cannot help, people are told.
    assert actions(unbroken.Health(action="roll-back"))[3:] == ["warn", "warn"]
    assert not unbroken.Health(action="off").is_on
    assert unbroken.Health().rolls_back
    assert not unbroken.Health(action="stop").rolls_back


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("action", "rollback"),
        ("plateau", "roll-back"),
        ("zero_rate", "roll-back"),
        ("spike", 3),
        ("spike_factor", 1),
        ("divergence_factor", math.nan),
        ("rate_factor", 0),
        ("rate_factor", 2),
        ("rate_steps", -1),
        ("warm_up_steps", 1.5),
        ("max_rollbacks", True),
        ("resume_factor", "much"),
        ("resume_steps", None),
        ("loss", None),
        ("replay", 7),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(keyword: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"Health: expected {keyword} to be .*, found"):
        unbroken.Health(**{keyword: value})  # type: ignore[arg-type]


def test_equal_losses_are_told_once_and_when_they_move_again() -> None:
    watch = HealthWatch(unbroken.Health())
    assert [told_of(watch, step, loss=0.6931471824645996) for step in range(1, 100)] == [[]] * 99
    (finding,) = told_of(watch, 100, loss=0.6931471824645996)
    assert (finding.kind, finding.action) == ("plateau", "warn")
    assert finding.text == "the loss has been exactly 0.6931471824645996 since step 1"
    assert told_of(watch, 101, loss=0.6931471824645996) == []
    (over,) = told_of(watch, 102, loss=0.69)
    assert (over.action, over.text) == ("warn", "the loss moves again")


def test_losses_that_are_zero_most_of_the_time_are_told_once() -> None:
    watch = HealthWatch(unbroken.Health(spike="off"))
    losses = [0.25 if step % 150 == 0 else 0.0 for step in range(1, 1000)]
    told = [one.text for step, loss in enumerate(losses, 1) for one in told_of(watch, step, loss=loss)]
    assert told == ["the loss has been exactly 0.0 since step 1", "the loss moves again"]
    # Another level is another matter.
    assert any(told_of(watch, step, loss=0.5) for step in range(1000, 1101))


def test_rates_at_zero_are_told_with_the_steps_that_are_left() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [one]} for one in parameters], lr=0.1)
    from unbroken.training import families

    rate = families.highest_rate({"a part": {}, "optimizer": optimizer})
    watch = HealthWatch(unbroken.Health(), rate=rate, goal_step=lambda: 50)
    optimizer.param_groups[0]["lr"] = 0.0
    assert [told_of(watch, step) for step in range(1, 10)] == [[]] * 9
    # A rate may be a tensor.
    optimizer.param_groups[1]["lr"] = torch.tensor(1e-15)
    assert [told_of(watch, step) for step in range(10, 14)] == [[]] * 4
    (finding,) = told_of(watch, 14)
    assert finding.kind == "zero-rate"
    assert finding.text == "all learning rates are zero since step 10, and 36 steps are left"
    assert told_of(watch, 15) == []
    optimizer.param_groups[0]["lr"] = 0.1
    assert [one.text for one in told_of(watch, 16)] == ["the learning rate is above zero again"]


def test_a_rate_that_ends_at_zero_with_the_training_is_as_it_should_be() -> None:
    watch = HealthWatch(unbroken.Health(), rate=lambda: 0.0, goal_step=lambda: 4)
    assert [told_of(watch, step) for step in range(1, 9)] == [[]] * 8


def test_a_goal_that_is_put_off_lets_nobody_train_on_at_a_rate_of_zero() -> None:
    goal = [4]
    watch = HealthWatch(unbroken.Health(), rate=lambda: 0.0, goal_step=lambda: goal[0])
    assert [told_of(watch, step) for step in range(2, 9)] == [[]] * 7
    goal[0] = 50
    assert [len(told_of(watch, step)) for step in range(9, 14)] == [0, 0, 1, 0, 0]


def test_the_worst_is_acted_on_first() -> None:
    watch = HealthWatch(unbroken.Health(warm_up_steps=10, plateau="stop"), rate=lambda: 0.0)
    for step in range(1, 101):
        watch.step(step, {"loss": 1.0})
    watch.step(101, {"loss": math.nan})
    found = []
    while (finding := watch.take()) is not None:
        found.append((finding.action, finding.kind))
    assert found == [("roll-back", "non-finite"), ("stop", "plateau"), ("warn", "zero-rate")]


@pytest.mark.parametrize("kept", [None, {"version": 99}, "nothing of ours"])
def test_from_a_checkpoint_without_a_state_the_watch_begins_anew(kept: Any) -> None:
    watch = HealthWatch(unbroken.Health())
    for step in range(1, 60):
        watch.step(step, {"loss": 1.0})
    watch.restore(kept)
    assert watch.state() == HealthWatch(unbroken.Health()).state()


def test_what_lasts_is_told_once_more_after_a_resume() -> None:
    policy = unbroken.Health(action="stop")

    def bad(watch: HealthWatch, step: int) -> set[str]:
        watch.step(step, {"loss": 1.0, "grad_norm": math.nan})
        return {finding.kind for finding in iter(watch.take, None)}

    watch = HealthWatch(policy, rate=lambda: 0.0)
    found = [bad(watch, step) for step in range(1, 130)]
    assert set().union(*found) == {"non-finite", "plateau", "zero-rate"}
    assert found[-1] == set()
    resumed = HealthWatch(policy, rate=lambda: 0.0)
    resumed.restore(watch.state())
    assert bad(resumed, 130) == {"non-finite", "plateau", "zero-rate"}
    assert bad(watch, 130) == bad(resumed, 131) == set()
    resumed = HealthWatch(policy, rate=lambda: 0.1)
    resumed.restore(watch.state())
    resumed.step(131, {"loss": 2.0, "grad_norm": 1.0})
    assert sorted(finding.text for finding in iter(resumed.take, None)) == [
        "the learning rate is above zero again",
        "the loss and the gradients are finite again",
        "the loss moves again",
    ]


def test_the_state_keeps_the_last_losses_and_no_time() -> None:
    first, second = (HealthWatch(unbroken.Health(resume_steps=20)) for _ in range(2))
    for watch in (first, second):
        for step in range(1, 60):
            watch.step(step, {"loss": 1 / step, "accuracy": 0.5})
        watch.step(60, {"loss": math.nan})
    state: Any = first.state()
    assert state == second.state()
    assert state["losses"] == [[step, 1 / step] for step in range(40, 60)]
    assert HealthWatch(unbroken.Health(action="off")).state() is None


def test_a_run_without_health_tells_people_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unbroken.Run(tmp_path, counters={"n": 0}) as run:
        for loss in (1.0, math.nan, math.nan, 1.0):
            run.step(loss=loss)
    assert "loss nan at step 2" in capsys.readouterr().err
    assert [(one["what"], "loss nan" in one["text"]) for one in alarms(tmp_path)] == [
        ("non-finite", True),
        ("over", False),
    ]
    health = CheckpointStore(tmp_path).latest().manifest.health
    assert health["losses"] == [[1, 1.0], [4, 1.0]]


def test_by_stop_the_run_ends_with_its_state_saved_and_is_not_restarted(tmp_path: Path) -> None:
    with (
        pytest.raises(UnhealthyError, match=r"loss nan at step 2.*saved in step-00000002"),
        unbroken.Run(tmp_path, health=unbroken.Health(non_finite="stop"), counters={"n": 0}) as run,
    ):
        for loss in (1.0, math.nan, 1.0):
            run.step(loss=loss)
    assert names(tmp_path) == ["step-00000002"]
    words = words_of(tmp_path)
    assert (words.kind, words.exit_code) == ("unhealthy", 78)


def test_a_resumed_run_need_not_learn_again_what_is_usual(tmp_path: Path) -> None:
    policy = unbroken.Health(action="warn")
    with unbroken.Run(tmp_path, health=policy, counters={"n": 0}) as run:
        for step in range(60):
            run.step(loss=1 + step % 3 / 10)
    with unbroken.Run(tmp_path, health=policy, counters={"n": 0}) as run:
        run.step(loss=1.0)
        run.step(loss=30.0)
    assert [one["what"] for one in alarms(tmp_path)][:1] == ["spike"]


def test_numbers_of_other_names_are_watched_if_they_are_named(tmp_path: Path) -> None:
    policy = unbroken.Health(action="warn", loss="nll", grad_norm="norm")
    with unbroken.Run(tmp_path, health=policy, counters={"n": 0}) as run:
        run.step(nll=1.0, norm=math.inf, loss=math.nan)
    (alarm,) = alarms(tmp_path)
    assert "norm inf at step 1" in alarm["text"]


@pytest.mark.parametrize(("policy", "times"), [(unbroken.Health(), 1), (unbroken.Health(action="warn"), 0)])
def test_a_watch_that_is_given_nothing_to_act_on_says_so(
    policy: unbroken.Health, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = HealthWatch(policy)
    for step in range(1, 300):
        watch.step(step, {"train_loss": 1.0} if step != 150 else {"loss": 1.0})
    said = "run.step was given neither 'loss' nor 'grad_norm' in 100 steps: nothing to watch"
    assert capsys.readouterr().err.count(said) == times
