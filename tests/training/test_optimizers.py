"""Optimizers: training goes on bit for bit, with the state by the names of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import StateMismatchError

from .runs import restore, save, small_model

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[str]:
    losses = []
    for seed in seeds:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(inputs) ** 2).mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()).hex())  # type: ignore[arg-type, union-attr]
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(5))
    save(tmp_path, model=model, optimizer=optimizer)
    expected = train(model, optimizer, range(5, 12))
    torch.manual_seed(2)
    again = small_model()
    other = OPTIMIZERS[name](again.parameters())
    restore(tmp_path, model=again, optimizer=other)
    assert train(again, other, range(5, 12)) == expected
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


class TestOptimizerMapping:
    def test_state_follows_the_names_of_parameters_not_their_order(self, tmp_path: Path) -> None:
        torch.manual_seed(1)
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, range(3))
        save(tmp_path, model=model, optimizer=optimizer)
        again = small_model()
        # Layers 0, 3 have equal shapes: by position their moments would be exchanged without a word.
        other = torch.optim.Adam(list(reversed(list(again.parameters()))), lr=0.01)
        restore(tmp_path, model=again, optimizer=other)
        for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(optimizer.state[one]["exp_avg"], other.state[two]["exp_avg"]), name

    def test_other_classes_groups_and_parameters_are_refused_before_anything_changes(
        self, tmp_path: Path
    ) -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, range(2))
        save(tmp_path, model=model, optimizer=optimizer)
        again = small_model()
        weights = copy.deepcopy(again.state_dict())
        parameters = list(again.parameters())
        wrong = {
            "class torch.optim.sgd.SGD, the checkpoint has class torch.optim.adam.Adam": torch.optim.SGD(
                parameters
            ),
            "2 parameter groups, the checkpoint has 1": torch.optim.Adam(
                [{"params": parameters[:2]}, {"params": parameters[2:]}]
            ),
            "the optimizer lacks parameter model.4.bias": torch.optim.Adam(parameters[:-1]),
        }
        for message, other in wrong.items():
            with pytest.raises(StateMismatchError, match=message):
                restore(tmp_path, model=again, optimizer=other)
            assert not other.state
            assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())

    def test_moments_keep_their_dtype_whatever_the_dtype_of_the_parameter(self, tmp_path: Path) -> None:
        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(3, 3, dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, optimizer

        model, optimizer = build()
        master = torch.randn(3, 3)
        optimizer.state[model.weight]["master"] = master.clone()
        save(tmp_path, model=model, optimizer=optimizer)
        again, other = build()
        restore(tmp_path, model=again, optimizer=other)
        found = other.state[again.weight]["master"]
        assert found.dtype == torch.float32
        assert torch.equal(found, master)

    def test_the_learning_rate_of_the_checkpoint_wins_and_is_reported(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
            assert optimizer.param_groups[0]["lr"] == 0.25
            assert run.restored is not None
            assert run.restored.learning_rates == (0.25,)
