"""Flavours of optimizers (fused, foreach, capturable) are the script's; a restore fits the state to them."""

from __future__ import annotations

import copy
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.testing.handler_contract import loaded, saved

from .runs import save

FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
CODECS = [NumpyCodec(), TorchCodec()]


def build(cls: str, flavour: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    make, options = CLASSES[cls]
    return model, make(model.parameters(), **options, **flavour)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        (model(inputs) ** 2).mean().backward()
        optimizer.step()


def restored_by_us(model: nn.Module, optimizer: torch.optim.Optimizer, saved_by: Any) -> None:
    """Restore as a run does it: the state goes through JSON and bytes."""
    source_model, source = saved_by
    kept = saved(OptimizerHandler({"model": source_model}), source, CODECS)
    model.load_state_dict(source_model.state_dict())
    handler = OptimizerHandler({"model": model})
    assert handler.differences(optimizer, loaded(kept, CODECS)) == []
    handler.restore(optimizer, loaded(kept, CODECS))


def restored_by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved_by: Any, flavour: dict[str, Any]
) -> None:
    source_model, source = saved_by
    model.load_state_dict(source_model.state_dict())
    state = copy.deepcopy(source.state_dict())
    for group in state["param_groups"]:
        group.update({"foreach": None, "fused": None, **flavour})
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), list(permutations(FLAVOURS, 2)))
@pytest.mark.parametrize("cls", CLASSES)
def test_after_a_change_of_flavour_training_goes_on_as_after_torchs_own_loading(
    cls: str, before: str, after: str
) -> None:
    first = build(cls, FLAVOURS[before])
    train(*first, range(4))
    ours, theirs = build(cls, FLAVOURS[after]), build(cls, FLAVOURS[after])
    restored_by_us(*ours, first)
    restored_by_torch(*theirs, first, FLAVOURS[after])
    train(*ours, range(4, 8))
    train(*theirs, range(4, 8))
    for one, two in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_restore_leaves_the_flavour_of_the_script(flavour: str) -> None:
    first = build("Adam", {"foreach": True})
    train(*first, range(2))
    model, optimizer = build("Adam", FLAVOURS[flavour])
    names = ("fused", "foreach", "capturable", "differentiable")
    expected = {name: optimizer.param_groups[0][name] for name in names}
    restored_by_us(model, optimizer, first)
    assert {name: optimizer.param_groups[0][name] for name in names} == expected


def test_what_belongs_to_the_arithmetic_is_the_checkpoints() -> None:
    first = build("Adam", {})
    train(*first, range(2))
    model, _ = build("Adam", {})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, maximize=True)
    restored_by_us(model, optimizer, first)
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert optimizer.param_groups[0]["maximize"] is False


@pytest.mark.parametrize("flavour", [{"fused": True}, {"capturable": True}, {"foreach": True}, {}])
@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)])
def test_the_count_of_steps_is_what_the_flavour_needs_also_from_older_states(
    flavour: dict[str, Any], step: Any
) -> None:
    first = build("Adam", {"foreach": False})
    train(*first, range(3))
    for entries in first[1].state.values():
        entries["step"] = copy.deepcopy(step)
    model, optimizer = build("Adam", flavour)
    restored_by_us(model, optimizer, first)
    for entries in optimizer.state.values():
        count = entries["step"]
        assert isinstance(count, torch.Tensor)
        assert float(count) == 3.0
        if "fused" in flavour or "capturable" in flavour:
            assert count.dtype == torch.float32


def test_a_differentiable_optimizer_can_be_restored() -> None:
    first = build("SGD", {})
    train(*first, range(2))
    model, optimizer = build("SGD", {"differentiable": True})
    restored_by_us(model, optimizer, first)
    assert optimizer.param_groups[0]["differentiable"] is True


def test_a_change_of_flavour_is_reported_with_the_one_in_force(tmp_path: Path) -> None:
    model, optimizer = build("AdamW", {"foreach": True})
    train(model, optimizer, range(2))
    save(tmp_path, model=model, optimizer=optimizer)
    model, optimizer = build("AdamW", {"fused": True})
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
        assert run.restored is not None
        report = "\n".join(run.restored.lines())
        assert optimizer.param_groups[0]["fused"] is True
        train(model, optimizer, range(2, 4))
        run.step()
    assert "group 0 fused: True of the script is used, the checkpoint has None" in report
    assert "group 0 foreach: None of the script is used, the checkpoint has True" in report
