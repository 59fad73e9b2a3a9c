"""Gradients: which parameters have one is state, and inside a step their values are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.testing.handler_contract import SavedState, loaded, saved_again


class Branches(nn.Module):
    """The second branch is used by the first two batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        return self.used(inputs) + (self.unused(inputs) if step < 2 else 0.0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def train(directory: Path, steps: int, *, kind: str, to_none: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with unbroken.Run(directory, model=model, optimizer=optimizer) as run:
        for step in range(run.step_count, steps):
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(4, 3), step).sum().backward()
            optimizer.step()
            run.step()
    return model.state_dict()


@pytest.mark.parametrize("to_none", [False, True], ids=["zeros", "none"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_branch_that_is_not_used_any_more_moves_as_in_an_uninterrupted_run(
    tmp_path: Path, kind: str, to_none: bool
) -> None:
    expected = train(tmp_path / "whole", 6, kind=kind, to_none=to_none)
    at_stop = train(tmp_path / "stopped", 3, kind=kind, to_none=to_none)
    train(tmp_path / "stopped", 5, kind=kind, to_none=to_none)
    found = train(tmp_path / "stopped", 6, kind=kind, to_none=to_none)
    # With zeros it moves on by momentum and weight decay, with None it stays.
    assert torch.equal(found["unused.weight"], at_stop["unused.weight"]) == to_none
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_model_without_gradients_has_no_word_of_them_in_its_state(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, model=nn.Linear(2, 2)) as run:
        run.step()
    manifest = CheckpointStore(tmp_path).latest().manifest
    assert manifest.parts["model"].state["(flags)"] == {"frozen": [], "evaluating": []}


def test_parameters_that_had_no_gradient_lose_the_one_they_have(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, model=nn.Linear(2, 2)) as run:
        run.step()
    again = nn.Linear(2, 2)
    again(torch.ones(1, 2)).sum().backward()
    with unbroken.Run(tmp_path, resume="must", model=again):
        assert again.weight.grad is None


def backward(model: nn.Module, seed: int) -> None:
    inputs = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "contiguous": convolution,
    "channels last": lambda: convolution().to(memory_format=torch.channels_last),
    "bfloat16": lambda: convolution().bfloat16().float(),
}


def kept_inside(handler: ModuleHandler, model: nn.Module) -> SavedState:
    return saved_again(handler.state_inside_step(model), [TorchCodec()])


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_inside_a_step_are_restored_and_added_to_bit_for_bit(kind: str) -> None:
    handler, build = ModuleHandler(), MODELS[kind]
    model, again = build(), build()
    backward(model, 1)
    kept = kept_inside(handler, model)
    state = loaded(kept, [TorchCodec()])
    assert handler.differences(again, state) == []
    handler.restore(again, state)
    assert kept_inside(handler, again) == kept
    backward(model, 2), backward(again, 2)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
        assert one.grad.stride() == other.grad.stride()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, again)]
    assert torch.equal(*norms)


def test_taking_the_state_inside_a_step_copies_no_gradient() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    state: Any = ModuleHandler().state_inside_step(model)
    assert state["(gradients)"]["weight"] is model.weight.grad


def test_a_gradient_of_another_shape_is_a_difference() -> None:
    handler, model = ModuleHandler(), nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    state: Any = handler.state_inside_step(model)
    state["(gradients)"]["weight"] = torch.zeros(3)
    found = handler.differences(nn.Linear(2, 2), state)
    assert [(one.kind, one.name) for one in found] == [("shape", "weight")]


@pytest.mark.parametrize("inside", [False, True], ids=["boundary", "inside a step"])
def test_sparse_gradients_stay_sparse(inside: bool) -> None:
    def build() -> tuple[nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    handler = ModuleHandler()
    (model, optimizer), (again, other) = build(), build()
    model(torch.tensor([1, 3, 3])).sum().backward()
    if not inside:
        optimizer.zero_grad(set_to_none=False)
    kept = kept_inside(handler, model) if inside else saved_again(handler.state(model), [TorchCodec()])
    handler.restore(again, loaded(kept, [TorchCodec()]))
    if inside:
        assert kept_inside(handler, again) == kept
    for each, steps in ((model, optimizer), (again, other)):
        each(torch.tensor([0, 3])).sum().backward()
        steps.step()
    assert torch.equal(model.weight, again.weight)


def test_tied_weights_have_one_gradient() -> None:
    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
        model["two"].weight = model["one"].weight  # type: ignore[assignment]
        return model

    handler, model, again = ModuleHandler(), build(), build()
    model["two"](torch.ones(1, 2)).sum().backward()
    state: Any = handler.state_inside_step(model)
    assert list(state["(gradients)"]) == ["one.weight", "two.bias"]
    handler.restore(again, loaded(kept_inside(handler, model), [TorchCodec()]))
    assert torch.equal(again["two"].weight.grad, model["one"].weight.grad)  # type: ignore[arg-type]
