"""Where a checkpoint does not fit, nothing is restored unless the user says by name what may differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events

from .runs import restore, save


class Net(nn.Module):
    def __init__(
        self, first: str = "encoder", last: str = "head", *, classes: int = 3, dtype: Any = None
    ) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(4, 4, dtype=dtype))
        self.add_module(last, nn.Linear(4, classes, dtype=dtype))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        for child in model.children():
            inputs = child(inputs)
        (inputs**2).mean().backward()
        optimizer.step()


def saved(directory: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save a run of two parts, trained a little."""
    model = Net(**options)
    optimizer = adam(model)
    train(model, optimizer)
    save(directory, model=model, optimizer=optimizer)
    return model, optimizer


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[parameter]["exp_avg"] for parameter in module.parameters()]


class TestRename:
    @pytest.mark.parametrize(
        "rename",
        [
            {"model.encoder": "model.backbone", "model.head": "model.classifier"},
            {"model.encoder.": "model.backbone.", "model.head.": "model.classifier."},
            {re.compile(r"\.encoder\."): ".backbone.", re.compile(r"\.head\b"): ".classifier"},
        ],
        ids=["segments", "with the dot", "regular expressions"],
    )
    def test_weights_and_their_optimizer_state_are_found_under_the_new_names(
        self, tmp_path: Path, rename: dict[Any, str]
    ) -> None:
        model, optimizer = saved(tmp_path)
        again = Net("backbone", "classifier")
        other = adam(again)
        with pytest.raises(StateMismatchError, match=r"encoder\.weight: the model lacks it"):
            restore(tmp_path, model=again, optimizer=other)
        restore(tmp_path, model=again, optimizer=other, rename=rename)
        assert equal(weights(model), weights(again))
        assert equal(moments(model, optimizer), moments(again, other))

    def test_the_next_checkpoint_has_the_new_names_and_the_map_may_stay(self, tmp_path: Path) -> None:
        saved(tmp_path)
        rename = {"model.encoder": "model.backbone"}
        for _ in range(3):
            again = Net("backbone")
            with unbroken.Run(tmp_path, model=again, optimizer=adam(again), rename=rename) as run:
                run.step()
        kept = CheckpointStore(tmp_path).latest().manifest.tensors
        assert "model/backbone.weight" in kept
        assert "model/encoder.weight" not in kept

    def test_two_names_can_change_places(self, tmp_path: Path) -> None:
        model, optimizer = saved(tmp_path, classes=4)
        again = Net("head", "encoder", classes=4)
        other = adam(again)
        rename = {"model.encoder": "model.head", "model.head": "model.encoder"}
        for _ in range(2):
            # At the second restart they have changed places already.
            with unbroken.Run(tmp_path, model=again, optimizer=other, rename=rename) as run:
                run.step()
            assert equal(weights(model), weights(again))
            assert equal(moments(model, optimizer), moments(again, other))

    def test_a_part_can_be_renamed_with_all_that_refers_to_it(self, tmp_path: Path) -> None:
        model, optimizer = saved(tmp_path)
        again = Net("backbone")
        other = adam(again)
        rename = {"model.encoder": "net.backbone", "model": "net", "optimizer": "adam"}
        restore(tmp_path, net=again, adam=other, rename=rename)
        assert equal(weights(model), weights(again))
        assert equal(moments(model, optimizer), moments(again, other))

    def test_tied_weights_stay_tied_under_new_names(self, tmp_path: Path) -> None:
        def build(first: str, last: str) -> nn.Module:
            net = Net(first, last, classes=4)
            net.get_submodule(last).weight = net.get_submodule(first).weight
            return net

        model = build("encoder", "head")
        save(tmp_path, model=model)
        again = build("backbone", "classifier")
        restore(
            tmp_path,
            model=again,
            rename={"model.encoder": "model.backbone", "model.head": "model.classifier"},
        )
        assert equal(weights(model), weights(again))

    def test_a_map_that_makes_one_name_of_two_is_refused(self, tmp_path: Path) -> None:
        saved(tmp_path, classes=4)
        again = Net()
        with pytest.raises(UsageError, match=r"model\.encoder"):
            restore(tmp_path, model=again, optimizer=adam(again), rename={"model.head": "model.encoder"})


class TestAllow:
    def test_what_is_missing_or_of_another_shape_stays_as_the_script_built_it(self, tmp_path: Path) -> None:
        model, optimizer = saved(tmp_path)
        again = Net(classes=7)
        built = weights(again)
        other = adam(again)
        with pytest.raises(StateMismatchError, match=r"head.weight: shape \(7, 4\), the checkpoint has"):
            restore(tmp_path, model=again, optimizer=other)
        restore(tmp_path, model=again, optimizer=other, allow=["*.head.*"])
        assert equal(weights(again)[:2], weights(model)[:2])
        assert equal(weights(again)[2:], built[2:])
        assert equal(
            moments(again.get_submodule("encoder"), other), moments(model.get_submodule("encoder"), optimizer)
        )

    def test_a_layer_may_be_gone_and_another_be_new(self, tmp_path: Path) -> None:
        model, _ = saved(tmp_path)
        again = Net("encoder", "other")
        other = adam(again)
        allow = ["model.head.*", "model.other.*"]
        with pytest.raises(StateMismatchError, match=r"head\.bias: the model lacks it"):
            restore(tmp_path, model=again, optimizer=other, allow=allow[1:])
        with unbroken.Run(tmp_path, model=again, optimizer=other, allow=allow) as run:
            assert run.restored is not None
            part = run.restored.as_json()["parts"]["model"]
            assert part["matched"] == {"tensors": 2, "bytes": 4 * 20}
            assert part["missing"] == part["unexpected"] == {"tensors": 2, "bytes": 4 * 15}
            text = "\n".join(run.restored.lines())
            assert "model: 2 missing in the checkpoint, as the script built them (60 bytes): " in text
            train(again, other)
            run.step()
        # The next one is whole.
        third = Net("encoder", "other")
        restore(tmp_path, model=third, optimizer=adam(third))
        assert equal(weights(again), weights(third))
        assert not equal(weights(model)[:2], weights(third)[:2])

    def test_a_model_of_which_nothing_fits_is_refused_whatever_is_allowed(self, tmp_path: Path) -> None:
        saved(tmp_path)
        again = Net("a", "b")
        built = weights(again)
        with pytest.raises(StateMismatchError, match="model: nothing in it fits"):
            restore(tmp_path, model=again, optimizer=adam(again), allow=["*"])
        assert equal(weights(again), built)

    def test_a_part_may_be_missing_or_be_left_out(self, tmp_path: Path) -> None:
        saved(tmp_path)
        again = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with pytest.raises(StateMismatchError, match="scaler: the checkpoint lacks this part"):
            restore(tmp_path, model=again, optimizer=adam(again), scaler=scaler)
        restore(tmp_path, model=again, optimizer=adam(again), scaler=scaler, allow=["scaler"])
        with pytest.raises(StateMismatchError, match="optimizer: the program lacks this part"):
            restore(tmp_path, model=again, scaler=scaler)
        restore(tmp_path, model=again, scaler=scaler, allow=["optimizer"])


class TestTies:
    def tied(self) -> tuple[nn.Module, nn.Module]:
        model, other = Net(classes=4), Net(classes=4)
        other.get_submodule("encoder").weight = model.get_submodule("encoder").weight
        return model, other

    @pytest.mark.parametrize("choice", [{"fresh": ["other"]}, {"allow": ["other"]}])
    def test_a_part_that_shared_weights_may_begin_anew_or_be_gone(
        self, tmp_path: Path, choice: dict[str, Any]
    ) -> None:
        model, other = self.tied()
        save(tmp_path, model=model, other=other)
        again = Net(classes=4)
        parts = {"other": Net(classes=4)} if "fresh" in choice else {}
        restore(tmp_path, model=again, **parts, **choice)
        assert equal(weights(model), weights(again))

    def test_an_untied_weight_is_refused_whatever_else_is_allowed(self, tmp_path: Path) -> None:
        def build(*, is_tied: bool, more: bool = False) -> nn.Module:
            net = Net(classes=4)
            if is_tied:
                net.get_submodule("head").weight = net.get_submodule("encoder").weight
            if more:
                net.add_module("more", nn.Linear(2, 2))
            return net

        save(tmp_path, model=build(is_tied=True))
        with pytest.raises(StateMismatchError, match="tied in the checkpoint, not here"):
            restore(tmp_path, model=build(is_tied=False, more=True), allow=["model.more.*"])


class TestCast:
    def test_another_dtype_is_refused_and_converted_on_request(self, tmp_path: Path) -> None:
        model, _ = saved(tmp_path)
        again = Net(dtype=torch.float64)
        other = adam(again)
        with pytest.raises(StateMismatchError, match=r"dtype torch.float64, the checkpoint has dtype"):
            restore(tmp_path, model=again, optimizer=other)
        with unbroken.Run(tmp_path, model=again, optimizer=other, cast=["model.*"]) as run:
            assert run.restored is not None
            assert run.restored.as_json()["parts"]["model"]["dtype"]["tensors"] == 4
        assert all(tensor.dtype == torch.float64 for tensor in again.parameters())
        assert equal([tensor.double() for tensor in weights(model)], weights(again))


class TestFresh:
    def test_another_optimizer_begins_anew_and_is_said_so(self, tmp_path: Path) -> None:
        model, _ = saved(tmp_path)
        again = Net()
        other = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
        with pytest.raises(
            StateMismatchError, match=r"class torch\.optim\.sgd\.SGD, the checkpoint has class"
        ):
            restore(tmp_path, model=again, optimizer=other)
        with unbroken.Run(tmp_path, model=again, optimizer=other, fresh=["optimizer"]) as run:
            assert run.restored is not None
            assert "optimizer: begins as the script built it" in run.restored.lines()
            assert run.restored.as_json()["parts"]["optimizer"]["fresh"]
        assert equal(weights(model), weights(again))
        assert not other.state

    def test_it_begins_anew_once_and_not_at_every_restart(self, tmp_path: Path) -> None:
        saved(tmp_path)
        kept = []
        for _ in range(3):
            again = Net()
            other = adam(again)
            with unbroken.Run(tmp_path, model=again, optimizer=other, fresh=["optimizer"]) as run:
                kept.append(bool(other.state))
                train(again, other)
                run.step()
        assert kept == [False, True, True]

    def test_a_run_that_begins_with_it_keeps_the_part_at_its_first_restart(self, tmp_path: Path) -> None:
        kept = []
        for _ in range(2):
            model = Net()
            optimizer = adam(model)
            with unbroken.Run(tmp_path, model=model, optimizer=optimizer, fresh=["optimizer"]) as run:
                kept.append(bool(optimizer.state))
                train(model, optimizer)
                run.step()
        assert kept == [False, True]


class TestOverride:
    def test_a_setting_of_the_script_wins_where_that_is_asked_for(self, tmp_path: Path) -> None:
        model = Net()
        save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25, weight_decay=0.5))
        again = Net()
        other = torch.optim.SGD(again.parameters(), lr=0.125, weight_decay=0.75)
        with unbroken.Run(tmp_path, model=again, optimizer=other, override=["*.weight_decay"]) as run:
            group = other.param_groups[0]
            assert (group["lr"], group["weight_decay"]) == (0.25, 0.75)
            assert run.restored is not None
            found = {item["key"]: item["in_force"] for item in run.restored.as_json()["settings"]}
            assert found == {"lr": "checkpoint", "weight_decay": "script"}
            assert run.restored.as_json()["learning_rates"] == {
                "in_force": [0.25],
                "checkpoint": [0.25],
                "script": [0.125],
            }

    def test_what_training_made_of_it_is_not_undone_at_each_restart(self, tmp_path: Path) -> None:
        found = []
        for rate in (0.5, 0.3, 0.3):
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            with unbroken.Run(tmp_path, model=model, optimizer=optimizer, override=["optimizer.lr"]) as run:
                found.append(optimizer.param_groups[0]["lr"])
                optimizer.param_groups[0]["lr"] *= 0.5
                run.step()
        assert found == [0.5, 0.3, 0.15]


class TestHorizon:
    def build(self, steps: int) -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def rates(self, directory: Path, parts: dict[str, Any], count: int, **choice: Any) -> list[float]:
        found = []
        with unbroken.Run(directory, **parts, **choice) as run:
            for _ in range(count):
                parts["optimizer"].step()
                parts["scheduler"].step()
                found.append(parts["optimizer"].param_groups[0]["lr"])
                run.step()
        return found

    def test_a_changed_one_is_refused_with_the_choices(self, tmp_path: Path) -> None:
        self.rates(tmp_path, self.build(10), 4)
        parts = self.build(20)
        with pytest.raises(
            StateMismatchError, match=r"T_max is 10 in the checkpoint, 20 in the script; choose"
        ) as caught:
            restore(tmp_path, **parts)
        assert "'stretch' (the new one from here on)" in caught.value.message
        assert parts["scheduler"].last_epoch == 0

    def test_each_choice_gives_the_rates_that_it_promises(self, tmp_path: Path) -> None:
        old = self.rates(tmp_path / "old", self.build(10), 8)
        new = self.rates(tmp_path / "new", self.build(20), 8)
        wanted = {"keep": old[4:], "stretch": new[4:], "hold": [old[3]] * 4}
        for choice, expected in wanted.items():
            directory = tmp_path / choice
            self.rates(directory, self.build(10), 4)
            found = self.rates(directory, self.build(20), 2, horizon=choice)
            found += self.rates(directory, self.build(20), 2, horizon=choice)
            assert found == pytest.approx(expected, rel=1e-12), choice
            assert found[:1] == pytest.approx(expected[:1])


class TestReport:
    def test_it_is_in_the_journal_for_machines(self, tmp_path: Path) -> None:
        saved(tmp_path)
        again = Net()
        restore(tmp_path, model=again, optimizer=adam(again))
        events = read_events(layout.attempt_directory(tmp_path, 2) / layout.events_file())
        report = next(event for event in events if event["kind"] == "began")["restored"]
        assert report["checkpoint"] == "step-00000001"
        assert report["parts"]["model"] == {
            "handler": "torch.module",
            "fresh": False,
            "matched": {"tensors": 4, "bytes": 140},
            "allowed": [],
        }
        assert {"python", "torch"} <= set(report["generators"]["0"])
        assert json.loads(json.dumps(report)) == report

    def test_a_rate_of_zero_is_pointed_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = Net()
        save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        restore(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        assert "every learning rate is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allow": "model.*"}, "expected a list of names for allow=, found 'model.*'"),
        ({"cast": [torch.float32]}, "expected a list of names for cast="),
        ({"fresh": ["optimiser"]}, "expected fresh= to name parts, found 'optimiser'; there are model"),
        (
            {"horizon": "longer"},
            r"expected horizon to be one of \('keep', 'stretch', 'hold'\), found 'longer'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        unbroken.Run(tmp_path, model=Net(), **given)
