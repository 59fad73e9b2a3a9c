"""Settings of optimizers: what the script changed is reported, and put in force where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from unbroken.errors import UsageError
from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.schedulers import SchedulerHandler
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.state.handlers import Setting
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder
from unbroken.testing.handler_contract import loaded, saved

CODECS = [NumpyCodec(), TorchCodec()]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def kept_state(make: MakeOptimizer) -> Any:
    model = nn.Linear(2, 2)
    return saved(OptimizerHandler({"model": model}), make(model.parameters()), CODECS)


def found_by(make: MakeOptimizer, kept: Any) -> list[Setting]:
    model = nn.Linear(2, 2)
    return OptimizerHandler({"model": model}).changed_settings(make(model.parameters()), loaded(kept, CODECS))


class TestWhatIsReported:
    def test_every_hyperparameter_that_the_script_changed(self) -> None:
        kept = kept_state(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        found = found_by(
            lambda parameters: torch.optim.AdamW(
                parameters, lr=0.2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.5, amsgrad=True
            ),
            kept,
        )
        assert {setting.key: (setting.saved, setting.script) for setting in found} == {
            "lr": (0.1, 0.2),
            "betas": ((0.9, 0.999), (0.8, 0.99)),
            "eps": (1e-8, 1e-6),
            "weight_decay": (0.01, 0.5),
            "amsgrad": (False, True),
        }
        assert found[0].text(script_wins=False).startswith("group 0 ")

    def test_a_rate_that_only_moved_is_no_change(self) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            lr_scheduler.ExponentialLR(optimizer, 0.5)
            return optimizer

        def moved(parameters: Any) -> torch.optim.Optimizer:
            optimizer = make(parameters)
            optimizer.param_groups[0]["lr"] = 0.025
            return optimizer

        assert found_by(make, kept_state(moved)) == []

    def test_a_momentum_that_a_scheduler_moves_is_no_change(self) -> None:
        def make(parameters: Any, steps: int = 0) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(parameters, lr=0.1)
            scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
            for _ in range(steps):
                optimizer.step()
                scheduler.step()
            return optimizer

        assert found_by(make, kept_state(lambda parameters: make(parameters, 4))) == []

    def test_rates_that_are_tensors_are_compared_by_value(self) -> None:
        kept = kept_state(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.5)))
        found = found_by(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.25)), kept)
        assert [(setting.key, setting.saved, setting.script) for setting in found] == [("lr", 0.5, 0.25)]

    def test_a_number_for_a_tensor_is_reported_and_keeps_the_value_of_the_checkpoint(self) -> None:
        kept = kept_state(lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.5)))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5, foreach=True)
        handler = OptimizerHandler({"model": model})
        settings = handler.changed_settings(optimizer, loaded(kept, CODECS))
        assert "group 0 lr: a float as in the script, the checkpoint has a Tensor" in [
            setting.text(script_wins=False) for setting in settings
        ]
        handler.restore(optimizer, loaded(kept, CODECS))
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert type(optimizer.param_groups[0]["lr"]) is float


def restore_and_override(optimizer: Any, parts: dict[str, Any], kept: Any, keys: set[str]) -> None:
    handler = OptimizerHandler(parts)
    settings = handler.changed_settings(optimizer, loaded(kept, CODECS))
    handler.restore(optimizer, loaded(kept, CODECS))
    handler.override(optimizer, [setting for setting in settings if setting.key in keys])


class TestOverride:
    def test_the_scripts_values_are_put_in_force_and_no_others(self) -> None:
        kept = kept_state(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.2, betas=(0.8, 0.99), weight_decay=0.5)
        restore_and_override(optimizer, {"model": model}, kept, {"lr", "weight_decay"})
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.5, (0.9, 0.999))

    def test_all_groups_that_differ_get_the_value_of_the_script(self) -> None:
        def build(model: nn.Linear, decay: float) -> torch.optim.Optimizer:
            groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}]
            return torch.optim.SGD(groups, lr=0.1, weight_decay=decay)

        first, model = nn.Linear(2, 2), nn.Linear(2, 2)
        kept = saved(OptimizerHandler({"model": first}), build(first, 0.0), CODECS)
        optimizer = build(model, 0.5)
        restore_and_override(optimizer, {"model": model}, kept, {"weight_decay"})
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]

    @pytest.mark.parametrize("as_tensor", [False, True])
    @pytest.mark.parametrize(
        "make",
        [
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
            lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)],
                milestones=[5],
            ),
        ],
    )
    def test_another_base_rate_gives_the_schedule_that_it_would_have_given(
        self, make: Callable[[Any], Any], as_tensor: bool
    ) -> None:
        def build(rate: float) -> tuple[Any, Any, dict[str, Any]]:
            model = nn.Linear(2, 2)
            optimizer = torch.optim.Adam(
                model.parameters(), lr=torch.tensor(rate) if as_tensor else rate, foreach=False
            )
            scheduler = make(optimizer)
            return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}

        def steps(optimizer: Any, scheduler: Any, count: int) -> list[float]:
            rates = []
            for _ in range(count):
                optimizer.step()
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
            return rates

        expected = steps(*build(0.2)[:2], 9)
        optimizer, scheduler, parts = build(0.1)
        steps(optimizer, scheduler, 3)
        kept = saved(OptimizerHandler(parts), optimizer, CODECS)
        kept_schedule = saved(SchedulerHandler(), scheduler, CODECS)
        optimizer, scheduler, parts = build(0.2)
        settings = OptimizerHandler(parts).changed_settings(optimizer, loaded(kept, CODECS))
        assert [setting.key for setting in settings] == ["lr"]
        SchedulerHandler().restore(scheduler, loaded(kept_schedule, CODECS))
        OptimizerHandler(parts).restore(optimizer, loaded(kept, CODECS))
        OptimizerHandler(parts).override(optimizer, settings)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected[2])
        assert scheduler.get_last_lr() == [pytest.approx(expected[2])]
        assert steps(optimizer, scheduler, 6) == pytest.approx(expected[3:])


class TestRename:
    def test_groups_state_and_paths_of_tensors_get_the_new_names(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        handler = OptimizerHandler({"model": model})
        table = TensorTable()
        encoded: Any = Encoder(table, CODECS).encode(handler.state(optimizer), "optimizer")
        renamed = handler.renamed(
            "optimizer", encoded, lambda name: name.replace("model.0.", "model.a/layer.")
        )
        assert renamed.state["groups"][0]["params"] == ["model.a/layer.weight", "model.a/layer.bias"]
        assert list(renamed.state["state"]) == ["model.a/layer.weight", "model.a/layer.bias"]
        assert renamed.paths["optimizer/state/model.0.weight/exp_avg"] == (
            "optimizer/state/model.a%2Flayer.weight/exp_avg"
        )
        assert set(renamed.paths) == set(table.sources)
        assert encoded["groups"][0]["params"] == ["model.0.weight", "model.0.bias"]

    def test_names_that_change_places_take_their_tensors_along(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        handler = OptimizerHandler({"model": model})
        encoded: Any = Encoder(TensorTable(), CODECS).encode(handler.state(optimizer), "optimizer")
        swap = {"model.0": "model.1", "model.1": "model.0"}
        renamed = handler.renamed("optimizer", encoded, lambda name: swap[name[:7]] + name[7:])
        assert renamed.paths["optimizer/state/model.0.bias/step"] == "optimizer/state/model.1.bias/step"
        # What refers to tensors is for the caller to change, everywhere at once.
        referred = renamed.state["state"]["model.1.bias"]["step"]["$tensor"]
        assert referred == "optimizer/state/model.0.bias/step"

    def test_two_parameters_of_one_name_are_refused(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adagrad(model.parameters())
        handler = OptimizerHandler({"model": model})
        encoded = Encoder(TensorTable(), CODECS).encode(handler.state(optimizer), "optimizer")
        with pytest.raises(UsageError, match=r"another becomes model\.x, too"):
            handler.renamed("optimizer", encoded, lambda name: "model.x")
