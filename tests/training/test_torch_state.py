"""Modules, optimizers, schedulers, scalers, generators, arrays: restored bit for bit, or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError

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


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


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


def save(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, resume="must", **parts):
        pass


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


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=8),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=9),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def trace(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates += [float(group["lr"]).hex() for group in optimizer.param_groups]
    return rates


@pytest.mark.parametrize("order", ["scheduler first", "optimizer first"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_gives_the_same_learning_rates(tmp_path: Path, name: str, order: str) -> None:
    def build() -> tuple[Any, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        parts = {"scheduler": scheduler, "optimizer": optimizer}
        if order == "optimizer first":
            parts = dict(reversed(parts.items()))
        return optimizer, scheduler, {"model": model, **parts}

    optimizer, scheduler, parts = build()
    trace(scheduler, optimizer, 6)
    save(tmp_path, **parts)
    expected = trace(scheduler, optimizer, 10)
    optimizer, scheduler, parts = build()
    restore(tmp_path, **parts)
    assert trace(scheduler, optimizer, 10) == expected


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


class TestModules:
    def test_wrappers_change_no_names(self, tmp_path: Path) -> None:
        model = small_model()
        save(tmp_path, model=nn.DataParallel(model))
        again = small_model()
        restore(tmp_path, model=torch.compile(again))
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)

    def test_tied_weights_are_kept_once_and_stay_tied(self, tmp_path: Path) -> None:
        def build(is_tied: bool) -> nn.Module:
            model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
            if is_tied:
                model["head"].weight = model["embed"].weight  # type: ignore[assignment]
            return model

        model = build(True)
        save(tmp_path, model=model)
        tensors = CheckpointStore(tmp_path).latest().manifest.tensors
        assert tensors["model/embed.weight"].aliases == ("model/head.weight",)
        assert "model/head.weight" not in tensors
        again = build(True)
        restore(tmp_path, model=again)
        assert again["head"].weight is again["embed"].weight  # type: ignore[index]
        assert torch.equal(again["embed"].weight, model["embed"].weight)  # type: ignore[index]
        with pytest.raises(StateMismatchError, match="tied in the checkpoint, not here"):
            restore(tmp_path, model=build(False))

    def test_a_view_costs_its_own_elements_and_odd_strides_keep_their_values(self, tmp_path: Path) -> None:
        big = torch.arange(100_000.0)
        parts = {
            "view": big[::10_000],
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "none": torch.zeros(0, 3),
        }
        save(tmp_path, **parts)
        assert CheckpointStore(tmp_path).latest().manifest.tensors["view"].size_bytes == 40
        again = {name: torch.zeros_like(value) for name, value in parts.items()}
        restore(tmp_path, **again)
        for name, value in parts.items():
            assert torch.equal(again[name], value)

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.uint64,
        ],
        ids=str,
    )
    def test_every_dtype_of_the_format_keeps_its_bits(self, tmp_path: Path, dtype: torch.dtype) -> None:
        bits = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
        value = bits.view(dtype) if dtype != torch.bool else bits.bool()
        save(tmp_path, value=value)
        again = torch.zeros_like(value)
        restore(tmp_path, value=again)
        assert torch.equal(again.view(torch.uint8), value.view(torch.uint8))

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (lambda: nn.Linear(2, 2, device="meta"), "on the meta device"),
            (lambda: nn.LazyLinear(2), "not initialised yet"),
            (lambda: {"x": torch.eye(2).to_sparse()}, "of layout torch.sparse_coo"),
            (lambda: {"x": torch.zeros(2, dtype=torch.complex128)}, "of dtype torch.complex128"),
        ],
        ids=["meta", "lazy", "sparse", "complex128"],
    )
    def test_what_has_no_bytes_to_keep_is_refused_by_its_path(
        self, tmp_path: Path, value: Callable[[], Any], problem: str
    ) -> None:
        with pytest.raises(UnsupportedStateError, match=f"^part/.*: cannot keep a tensor {problem}"):
            save(tmp_path, part=value())


class TestOtherParts:
    def test_a_gradient_scaler_keeps_its_scale_and_growth_counter(self, tmp_path: Path) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            scaler.scale((weight * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        expected = scaler.state_dict()
        assert expected["scale"] == 2.0**11
        save(tmp_path, scaler=scaler)
        again = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        restore(tmp_path, scaler=again)
        assert again.state_dict() == expected

    def test_an_averaged_model_keeps_its_count(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            average.update_parameters(model)
        save(tmp_path, model=model, average=average)
        again = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        restore(tmp_path, model=nn.Linear(2, 2), average=again)
        assert int(again.n_averaged) == 3

    def test_generators_of_all_libraries_go_on(self, tmp_path: Path) -> None:
        def build(seed: int) -> dict[str, Any]:
            return {
                "python": random.Random(seed),
                "numpy": np.random.default_rng(seed),
                "legacy": np.random.RandomState(seed),
                "torch": torch.Generator().manual_seed(seed),
            }

        def draw(generators: dict[str, Any]) -> list[float]:
            return [
                generators["python"].gauss(0, 1),
                float(generators["numpy"].normal()),
                float(generators["legacy"].normal()),
                float(torch.randn((), generator=generators["torch"])),
            ]

        generators = build(1)
        draw(generators)
        save(tmp_path, **generators)
        expected = draw(generators)
        again = build(2)
        restore(tmp_path, **again)
        assert draw(again) == expected

    def test_a_hand_made_dictionary_of_tensors_is_filled_in_place(self, tmp_path: Path) -> None:
        average = {"weight": torch.ones(3), "inner": {"list": [torch.zeros(2)]}, "n": 3}
        save(tmp_path, average=average)
        again: dict[str, Any] = {"weight": torch.zeros(3), "inner": {"list": [torch.ones(2)]}, "n": 0}
        held = again["weight"], again["inner"], again["inner"]["list"], again["inner"]["list"][0]
        restore(tmp_path, average=again)
        assert torch.equal(held[0], torch.ones(3))
        assert torch.equal(held[3], torch.zeros(2))
        assert again["n"] == 3
        assert again["weight"] is held[0]
        assert again["inner"] is held[1]
        assert again["inner"]["list"] is held[2]

    def test_arrays_scalars_and_dataclasses_keep_their_types(self, tmp_path: Path) -> None:
        save(
            tmp_path,
            array=np.arange(6, dtype=np.int16).reshape(2, 3),
            values={
                "scalar": np.float32(0.1),
                "dtype": np.dtype("int8"),
                "torch": torch.float16,
                "size": torch.Size([2]),
            },
            progress=Progress(best=0.5, history=[(1, 0.1)]),
        )
        array = np.zeros((2, 3), dtype=np.int16)
        values: dict[str, Any] = {}
        progress = Progress()
        restore(tmp_path, array=array, values=values, progress=progress)
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert isinstance(values["scalar"], np.float32)
        assert values["scalar"] == np.float32(0.1)
        assert (values["dtype"], values["torch"], values["size"]) == (
            np.dtype("int8"),
            torch.float16,
            torch.Size([2]),
        )
        assert progress == Progress(best=0.5, history=[(1, 0.1)])

    def test_an_object_that_does_not_restore_what_it_saved_is_caught(self, tmp_path: Path) -> None:
        class Forgetful:
            patience = 0

            def state_dict(self) -> dict[str, int]:
                return {"patience": self.patience}

            def load_state_dict(self, state: dict[str, int]) -> None:
                pass

        stopper = Forgetful()
        stopper.patience = 3
        save(tmp_path, stopper=stopper)
        with pytest.raises(StateMismatchError, match="read back the live state differs at stopper"):
            restore(tmp_path, stopper=Forgetful())


@dataclass
class Progress:
    best: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)
