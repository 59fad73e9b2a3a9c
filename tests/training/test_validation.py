"""The user's own check before each checkpoint: what it refuses is evidence, and it leaves no trace."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.manifest import Validation
from unbroken.checkpoint.store import CheckpointStore, newest_verified
from unbroken.cli.main import main
from unbroken.errors import UsageError
from unbroken.rundir.journal import read_events
from unbroken.training import validation

from .runs import names, small_model, steps, words_of

PROBE = torch.ones(3, 4)


def save_with(directory: Path, check: Callable[[], object], count: int = 1, **keywords: Any) -> None:
    options: dict[str, Any] = {"save": [unbroken.EverySteps(1)], "keep": [], "counters": {"n": 0}, **keywords}
    with unbroken.Run(directory, validate=check, **options) as run:
        steps(run, count)


def validations(directory: Path) -> list[Validation | None]:
    store = CheckpointStore(directory)
    return [store.get(name).manifest.validation for name in store.names()]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    found = read_events(directory / "attempts/0001/events-rank0.jsonl")
    return [event for event in found if event["kind"] == kind]


@pytest.mark.parametrize("answer", [None, True, torch.tensor(True), np.bool_(True)], ids=repr)
def test_a_state_that_passes_is_marked_as_good(tmp_path: Path, answer: object) -> None:
    save_with(tmp_path, lambda: answer)
    assert validations(tmp_path) == [Validation(passed=True)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(False, "the check says no"), (torch.tensor([1.0]) > 2, "the check says no"), ("loss 9.5", "loss 9.5")],
)
def test_a_state_that_fails_is_kept_with_the_reason(tmp_path: Path, answer: object, reason: str) -> None:
    save_with(tmp_path, lambda: answer)
    assert validations(tmp_path) == [Validation(passed=False, reason=reason)]


@pytest.mark.parametrize("answer", ["", 0, 1.5, torch.tensor(0.3), torch.tensor([True, False])], ids=repr)
def test_any_other_answer_is_refused(tmp_path: Path, answer: object) -> None:
    with pytest.raises(UsageError, match="validate=: expected None or True"):
        save_with(tmp_path, lambda: answer)


def test_without_a_check_a_manifest_says_nothing(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, counters={"n": 0}) as run:
        run.step()
    assert validations(tmp_path) == [None]


def test_what_failed_is_told_and_never_latest_nor_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([True, "too sharp"])
    with unbroken.Run(
        tmp_path,
        validate=lambda: next(answers),
        save=[unbroken.EverySteps(1)],
        keep=[unbroken.KeepBest(1, "accuracy")],
        counters={"n": 0},
    ) as run:
        run.step(accuracy=0.5)
        run.step(accuracy=0.9)
    # The second is the newest, and stays as evidence.
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "latest").resolve().name == "step-00000001"
    assert newest_verified(tmp_path) == "step-00000001"
    assert "step-00000002 failed its validation (too sharp)" in capsys.readouterr().err
    (alarm,) = events(tmp_path, "alarm")
    assert alarm["what"] == "validation"
    assert [event["found"] for event in events(tmp_path, "not-valid")] == ["too sharp"]
    alarms = read_events(tmp_path / "attempts/0001/alarms.jsonl")
    assert [event["what"] for event in alarms] == ["validation"]


def test_retention_does_not_count_what_failed(tmp_path: Path) -> None:
    answers = iter([True, True, False, False, False])
    save_with(tmp_path, lambda: next(answers), 5, keep=[unbroken.KeepLast(2)])
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000005"]


def test_a_warm_start_takes_the_newest_that_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, model = iter([True, False]), nn.Linear(2, 2)
    with unbroken.Run(
        tmp_path, validate=lambda: next(answers), save=[unbroken.EverySteps(1)], keep=[], model=model
    ) as run:
        run.step()
        run.step()
    unbroken.warm_start(nn.Linear(2, 2), tmp_path)
    told = capsys.readouterr().err
    assert "step-00000002 is not validated: the check says no; step-00000001 is taken" in told


def test_a_snapshot_is_not_asked_about(tmp_path: Path) -> None:
    asked: list[int] = []
    with unbroken.Run(
        tmp_path,
        validate=lambda: asked.append(1),
        save=[],
        snapshot=[unbroken.EverySteps(1)],
        counters={"n": 0},
    ) as run:
        steps(run, 3)
        assert not asked
    assert validations(tmp_path) == [Validation(passed=True)]


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def test_what_it_draws_moves_no_generator(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(3)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state(), own.get_state()
    with unbroken.Run(
        tmp_path, validate=lambda: bool(draws() and torch.rand(1, generator=own) >= 0), own=own
    ) as run:
        run.step()
        run.save()
        found = [*draws(), float(torch.rand(1, generator=own))]
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    own.set_state(state[3])
    assert found == [*draws(), float(torch.rand(1, generator=own))]


def test_the_modes_of_modules_are_put_back_each_by_itself(tmp_path: Path) -> None:
    model = small_model()
    model[0].eval()
    before = [module.training for module in model.modules()]

    def check() -> None:
        model.eval()
        with torch.no_grad():
            model(PROBE)

    with unbroken.Run(tmp_path, validate=check, model=model) as run:
        run.step()
        run.save()
        assert [module.training for module in model.modules()] == before


def trains(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1.0)


def past_autograd(model: nn.Module) -> None:
    next(model.parameters()).data[0, 0] += 1.0


def moves_statistics(model: nn.Module) -> None:
    with torch.no_grad():
        model(PROBE)


def leaves_gradients(model: nn.Module) -> None:
    model.eval()
    model(PROBE).sum().backward()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (trains, "model.0.weight changed"),
        (past_autograd, "model.0.weight changed"),
        (moves_statistics, "model.1.num_batches_tracked, model.1.running_mean, model.1.running_var changed"),
        (leaves_gradients, "model changed"),
    ],
)
def test_a_check_that_changes_the_state_is_an_error_that_names_what(
    tmp_path: Path, change: Callable[[nn.Module], None], named: str
) -> None:
    model = small_model()
    with pytest.raises(UsageError) as caught:
        save_with(tmp_path, lambda: change(model), model=model)
    assert named in caught.value.message
    assert "must not train" in caught.value.hint


def test_gradients_that_it_adds_to_others_are_an_error(tmp_path: Path) -> None:
    model = small_model()
    leaves_gradients(model)
    with pytest.raises(UsageError, match="gradients changed"):
        save_with(tmp_path, lambda: leaves_gradients(model), model=model)


def test_weights_that_are_swapped_and_put_back_are_no_change(tmp_path: Path) -> None:
    model = small_model()
    averaged = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}

    def check() -> None:
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(averaged)
        model.eval()(PROBE)
        model.load_state_dict(own)

    save_with(tmp_path, check, model=model)
    assert validations(tmp_path) == [Validation(passed=True)]


def test_a_counter_that_it_moves_is_named_too(tmp_path: Path) -> None:
    counters = {"n": 0}
    with pytest.raises(UsageError, match="counters changed"):
        save_with(tmp_path, lambda: counters.update(n=1), counters=counters)


class Reordering(nn.Module):
    """Its weights lie in another order than the one of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def reorder(self) -> None:
        with torch.no_grad():
            self.conv.weight.copy_(self.conv.weight.flip(0).clone())


def test_a_check_that_only_reorders_is_found_out(tmp_path: Path) -> None:
    model = Reordering()
    with pytest.raises(UsageError, match=r"model\.conv\.weight changed"):
        save_with(tmp_path, model.reorder, model=model)


def fails() -> None:
    raise OSError("the probe file has gone")


@pytest.mark.parametrize(
    ("check", "error", "reason"),
    [
        (fails, OSError, "the check has failed itself: OSError: the probe file has gone"),
        (lambda: 0, UsageError, "the check has failed itself: UsageError: validate=: expected None or True"),
    ],
)
@pytest.mark.parametrize("how", ["regularly", "at the end", "at a stop"])
def test_what_goes_wrong_in_it_loses_no_training(
    tmp_path: Path, how: str, check: Callable[[], object], error: type[Exception], reason: str
) -> None:
    regularly = [unbroken.EverySteps(2)] if how == "regularly" else []
    model = small_model()
    model.train()
    with (
        pytest.raises(error) as caught,
        unbroken.Run(
            tmp_path, validate=lambda: (model.eval(), check())[1], save=regularly, model=model
        ) as run,
    ):
        run.step()
        if how == "at a stop":
            signal.raise_signal(signal.SIGTERM)
        run.step()
    assert caught.value.__notes__[-1] == "in the check of validate=, before the checkpoint of step 2"
    (found,) = validations(tmp_path)
    assert found is not None
    assert not found.passed
    assert found.reason.startswith(reason)
    assert words_of(tmp_path).checkpoint == "step-00000002"
    # What it did to the modes is not in the state that is kept.
    assert model.training


def test_what_it_changed_before_it_went_wrong_is_not_kept(tmp_path: Path) -> None:
    counters = {"n": 0}

    def check() -> None:
        counters["n"] += 1
        fails()

    with pytest.raises(UsageError, match="counters changed") as caught:
        save_with(tmp_path, check, counters=counters)
    assert isinstance(caught.value.__cause__, OSError)
    assert not validations(tmp_path)


def test_it_is_not_asked_before_the_first_step(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, validate=fails, save=[], keep=[], counters={"n": 0}) as run:
        run.save()
    assert validations(tmp_path) == [None]


def test_a_reason_reaches_no_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with(tmp_path, lambda: "bad\x1b[31m\n" + "long " * 1000)
    (found,) = validations(tmp_path)
    assert found is not None
    assert found.reason.startswith(r"bad\x1b[31m\nlong long")
    assert len(found.reason) == 300
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["bad\x1b[31m\nnext", "long " * 1000])
def test_a_list_shows_a_reason_of_anybody_in_a_short_line(
    tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_in_a_line", lambda text: text)
    save_with(tmp_path, lambda: reason)
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) < 150
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("call", [lambda run: run.step(), lambda run: run.save()], ids=["step", "save"])
def test_it_may_not_train(tmp_path: Path, call: Callable[[unbroken.Run], None]) -> None:
    runs: list[unbroken.Run] = []
    with (
        pytest.raises(UsageError, match="not to be called in the check of validate="),
        unbroken.Run(
            tmp_path, validate=lambda: call(runs[0]), save=[unbroken.EverySteps(1)], counters={"n": 0}
        ) as run,
    ):
        runs.append(run)
        run.step()


def trained(directory: Path, check: Callable[[nn.Module], object] | None) -> dict[str, torch.Tensor]:
    """Train on shuffled data with dropout, and stop and go on half-way; return the weights."""
    dataset = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    for epochs in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = torch.utils.data.DataLoader(dataset, batch_size=3, shuffle=True)
        with unbroken.Run(
            directory,
            save=[unbroken.EverySteps(3)],
            validate=None if check is None else lambda: check(model),  # noqa: B023 - called in the block
            model=model,
            optimizer=optimizer,
        ) as run:
            for _ in run.epochs(epochs):
                for (batch,) in run.batches(loader):
                    optimizer.zero_grad()
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss)
    return model.state_dict()


def test_training_with_a_check_is_the_same_to_the_bit_as_without(tmp_path: Path) -> None:
    def check(model: nn.Module) -> bool:
        model.eval()
        own = torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2, shuffle=True)
        with torch.no_grad():
            return bool(sum(model(batch).square().sum() for batch in own) < math.inf)

    without, with_check = trained(tmp_path / "without", None), trained(tmp_path / "with", check)
    assert all(torch.equal(without[name], with_check[name]) for name in without)
    assert set(validations(tmp_path / "with")) == {Validation(passed=True)}
