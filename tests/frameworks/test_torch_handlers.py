"""The handlers of torch objects keep the promises of the contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.schedulers import SchedulerHandler
from unbroken.frameworks.torch.tensors import TensorHandler, TorchCodec
from unbroken.state.tree import LeafCodec
from unbroken.testing.handler_contract import Change, HandlerContract, Make, Parts


def run_codecs() -> list[LeafCodec]:
    """The codecs that a run gives its handlers."""
    return [NumpyCodec(), TorchCodec()]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


class Kept(nn.Module):
    """A module with a state that is neither parameter nor buffer, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"scale": torch.ones(3), "seen": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


class TestModule(HandlerContract):
    @pytest.fixture
    def handler(self) -> ModuleHandler:
        return ModuleHandler()

    @pytest.fixture
    def make(self) -> Make:
        def build() -> nn.Module:
            model = nn.ModuleDict(
                {"first": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "kept": Kept(), "head": nn.Linear(3, 3)}
            )
            model["head"].weight = model["first"].weight  # type: ignore[assignment]
            return model

        return build

    @pytest.fixture
    def change(self) -> Change:
        def train(model: Any) -> None:
            count = int(model["norm"].num_batches_tracked)
            model["norm"].train()
            model["norm"](noise(torch.empty(4, 3), count))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(noise(parameter, count))
            model["kept"].extra["scale"].mul_(1.5)
            model["kept"].extra["seen"] += 1
            model["norm"].eval()
            model["first"].bias.requires_grad_(count % 2 == 1)

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda model: [*model.modules(), *model.parameters(), *model.buffers()]


class WithPreconditioners(torch.optim.Optimizer):
    """An optimizer with nested state, as second-order methods have it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                square = torch.zeros(parameter.shape[0])
                state["factors"] = {"left": square.clone(), "pair": (square.clone(), [square.clone()])}
                state["count"] = 0
            factors = state["factors"]
            for factor in (factors["left"], factors["pair"][0], factors["pair"][1][0]):
                factor.add_(parameter.grad.flatten(1).sum(1) if parameter.dim() > 1 else parameter.grad)
            state["count"] += 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "AdamW lr tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1, history_size=3),
    "nested state": WithPreconditioners,
}


class TestOptimizer(HandlerContract):
    @pytest.fixture
    def model(self) -> nn.Module:
        return nn.Linear(3, 3)

    @pytest.fixture
    def handler(self, model: nn.Module) -> OptimizerHandler:
        return OptimizerHandler({"model": model})

    @pytest.fixture(params=OPTIMIZERS)
    def make(self, model: nn.Module, request: pytest.FixtureRequest) -> Make:
        def build() -> torch.optim.Optimizer:
            optimizer = OPTIMIZERS[request.param](model.parameters())
            for group in optimizer.param_groups:
                # As a scheduler notes it, since the rate moves here.
                group["initial_lr"] = copy.deepcopy(group["lr"])
            return optimizer

        return build

    @pytest.fixture
    def change(self, model: nn.Module) -> Change:
        def train(optimizer: Any) -> None:
            # Gradients that follow from the state, so that the same state changes the same way.
            group = optimizer.param_groups[0]
            for parameter in model.parameters():
                parameter.grad = noise(parameter, seed=int(float(group["lr"]) * 2**20))
                parameter.detach().zero_()
            group["lr"] = group["lr"].mul_(0.5) if isinstance(group["lr"], torch.Tensor) else group["lr"] / 2
            optimizer.step(lambda: 1.0) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda optimizer: [
            *optimizer.param_groups,
            *(parameter for group in optimizer.param_groups for parameter in group["params"]),
            *(group["lr"] for group in optimizer.param_groups if isinstance(group["lr"], torch.Tensor)),
        ]


class Counting:
    """A schedule that depends on how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "LambdaLR with an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Counting()),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=6),
}


class TestScheduler(HandlerContract):
    @pytest.fixture
    def handler(self) -> SchedulerHandler:
        return SchedulerHandler()

    @pytest.fixture(params=SCHEDULERS)
    def make(self, request: pytest.FixtureRequest) -> Make:
        def build() -> Any:
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
            return SCHEDULERS[request.param](optimizer)

        return build

    @pytest.fixture
    def change(self) -> Change:
        def train(scheduler: Any) -> None:
            # A run restores the learning rate with the optimizer; here it is the scheduler's last.
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            scheduler.optimizer.step()
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda scheduler: [scheduler.optimizer, *getattr(scheduler, "_schedulers", [])]


TENSORS: dict[str, Make] = {
    "plain": lambda: torch.zeros(2, 3),
    "half": lambda: torch.zeros(5, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(0.0),
    "turned": lambda: torch.zeros(3, 2).t(),
    "view of a larger one": lambda: torch.zeros(10, 10)[::3, 1:4],
    "parameter": lambda: nn.Parameter(torch.zeros(4)),
}


class TestTensor(HandlerContract):
    @pytest.fixture
    def handler(self) -> TensorHandler:
        return TensorHandler()

    @pytest.fixture(params=TENSORS)
    def make(self, request: pytest.FixtureRequest) -> Make:
        return TENSORS[request.param]

    @pytest.fixture
    def change(self) -> Change:
        return lambda tensor: tensor.detach().mul_(1.25).add_(1)

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    def test_a_view_of_it_shows_what_was_restored(self, handler: TensorHandler, make: Make) -> None:
        tensor = make()
        view = tensor.detach().view(tensor.shape)
        handler.restore(tensor, torch.full_like(view, 7))
        assert torch.equal(view, torch.full_like(view, 7))
