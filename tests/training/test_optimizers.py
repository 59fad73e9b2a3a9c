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
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "SGD maximize": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, maximize=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "Adam rate tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "NAdam decoupled": lambda parameters: torch.optim.NAdam(
        parameters, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.5),
    "Adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.01, t0=4),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=3),
    "LBFGS line search": lambda parameters: torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
    ),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda parameters: torch.optim.Muon(parameters, lr=0.01)


class Embedded(nn.Module):
    """A model whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((inputs.abs() * 4).long().clamp(max=9))
        return found


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"SparseAdam": Embedded, "Muon": matrices}


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
    build = MODELS.get(name, small_model)
    torch.manual_seed(1)
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(5))
    save(tmp_path, model=model, optimizer=optimizer)
    expected = train(model, optimizer, range(5, 12))
    torch.manual_seed(2)
    again = build()
    other = OPTIMIZERS[name](again.parameters())
    restore(tmp_path, model=again, optimizer=other)
    assert train(again, other, range(5, 12)) == expected
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_every_optimizer_of_this_torch_is_among_these() -> None:
    classes = {
        item
        for item in vars(torch.optim).values()
        if isinstance(item, type) and issubclass(item, torch.optim.Optimizer)
    }
    tried = {
        type(build(list(MODELS.get(name, small_model)().parameters()))) for name, build in OPTIMIZERS.items()
    }
    assert classes - {torch.optim.Optimizer} == tried


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

    def test_the_parameters_may_come_from_a_set(self, tmp_path: Path) -> None:
        # In every process such a set has another order.
        orders = [lambda items: items, lambda items: items[3:] + items[:3], lambda items: items[::-1]]
        for rotation, order in enumerate(orders):
            torch.manual_seed(1)
            model = small_model()
            optimizer = torch.optim.Adam(order(list(model.parameters())), lr=0.01)
            with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
                train(model, optimizer, range(rotation * 3, rotation * 3 + 3))
                run.step()
        torch.manual_seed(1)
        twin = small_model()
        train(twin, torch.optim.Adam(twin.parameters(), lr=0.01), range(9))
        assert all(
            torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True)
        )

    def test_parameters_may_stand_in_a_dictionary_a_list_or_alone(self, tmp_path: Path) -> None:
        def build(*, turned: bool) -> tuple[dict[str, Any], torch.optim.Optimizer]:
            parts: dict[str, Any] = {
                "by_name": {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))},
                "listed": nn.ParameterList([torch.zeros(2), torch.zeros(2)]),
                "alone": nn.Parameter(torch.zeros(2)),
            }
            found = [*parts["by_name"].values(), *parts["listed"], parts["alone"]]
            optimizer = torch.optim.Adam(found[::-1] if turned else found, lr=0.1)
            return {**parts, "optimizer": optimizer}, optimizer

        parts, optimizer = build(turned=False)
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            parameter.grad = torch.full((2,), float(index + 1))
        optimizer.step()
        save(tmp_path, **parts)
        again, other = build(turned=True)
        restore(tmp_path, **again)
        expected = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in _named(parts)}
        for name, parameter in _named(again):
            assert torch.equal(other.state[parameter]["exp_avg"], expected[name]), name

    @pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4, 4), ()])
    def test_a_moment_of_another_shape_is_refused_before_anything_changes(
        self, tmp_path: Path, shape: tuple[int, ...]
    ) -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, range(2))
        optimizer.state[next(model.parameters())]["exp_avg"] = torch.zeros(shape)
        save(tmp_path, model=model, optimizer=optimizer)
        again = small_model()
        weights = copy.deepcopy(again.state_dict())
        other = torch.optim.Adam(again.parameters())
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, model=again, optimizer=other)
        assert "optimizer: model.0.weight: exp_avg has shape" in str(caught.value)
        assert not other.state
        assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())

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

    def test_moments_in_bfloat16_stay_in_bfloat16(self, tmp_path: Path) -> None:
        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = small_model().to(torch.bfloat16)
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)

        model, optimizer = build()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        save(tmp_path, model=model, optimizer=optimizer)
        again, other = build()
        restore(tmp_path, model=again, optimizer=other)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert other.state[two]["exp_avg"].dtype == torch.bfloat16
            assert torch.equal(optimizer.state[one]["exp_avg"], other.state[two]["exp_avg"])
            assert other.state[two]["step"].dtype == torch.float32

    def test_hyperparameters_that_are_tensors_stay_the_same_tensors(self, tmp_path: Path) -> None:
        def build(rate: float, beta: float) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(2, 2)
            betas = (torch.tensor(beta), torch.tensor(0.999))
            optimizer = torch.optim.Adam(
                model.parameters(),
                lr=torch.tensor(rate),
                betas=betas,
                foreach=False,
                capturable=True,
            )
            return model, optimizer

        model, optimizer = build(0.25, 0.5)
        save(tmp_path, model=model, optimizer=optimizer)
        again, other = build(0.5, 0.75)
        group = other.param_groups[0]
        rate, beta = group["lr"], group["betas"][0]
        restore(tmp_path, model=again, optimizer=other)
        assert group["lr"] is rate
        assert group["betas"][0] is beta
        assert (float(rate), float(beta)) == (0.25, 0.5)

    def test_the_learning_rate_of_the_checkpoint_wins_and_is_reported(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
            assert optimizer.param_groups[0]["lr"] == 0.25
            assert run.restored is not None
            assert run.restored.learning_rates == (0.25,)


def _named(parts: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    listed = enumerate(parts["listed"])
    return [
        *parts["by_name"].items(),
        *((str(index), item) for index, item in listed),
        ("alone", parts["alone"]),
    ]
