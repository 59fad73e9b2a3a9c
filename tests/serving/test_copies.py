"""Of which modules there can be two, so that one serves what the other is not filled with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch.copies import two_copies

from .stamped import eventually, save, stamp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(x)
        return found


def with_another_forward() -> nn.Module:
    model = Net()
    plain = model.forward
    model.forward = lambda x: plain(2 * x)  # type: ignore[method-assign]
    return nn.Sequential(model)


def with_a_function() -> nn.Module:
    model: Any = Net()
    model.act = [lambda x: model.first(2 * x)]
    return model  # type: ignore[no-any-return]


def with_a_view_of_its_weights() -> nn.Module:
    model: Any = Net()
    weight = model.first.weight.detach()[0]
    model.act = lambda x: x @ weight
    return model  # type: ignore[no-any-return]


def with_a_hook() -> nn.Module:
    model = Net()
    model.register_forward_hook(lambda module, given, found: found * model.first.weight.mean())
    return model


GLOBAL = Net()


def with_a_hook_that_names_a_global() -> nn.Module:
    GLOBAL.register_forward_hook(lambda module, given, found: sum(GLOBAL.first(one) for one in found))
    return GLOBAL


def with_a_child_that_knows_it() -> nn.Module:
    model: Any = Net()
    model.first.parent = weakref.ref(model)
    return model  # type: ignore[no-any-return]


class Shared(Net):
    def __deepcopy__(self, _: object) -> Shared:
        return self


@pytest.mark.parametrize(
    ("build", "place"),
    [
        (with_another_forward, "0.forward"),
        (with_a_function, "act"),
        (with_a_view_of_its_weights, "act"),
        (with_a_hook, "_forward_hooks"),
        (with_a_hook_that_names_a_global, "_forward_hooks"),
        (with_a_child_that_knows_it, "first.parent"),
        (Shared, "the module itself"),
        (lambda: nn.Sequential(nn.ReLU(), Shared()), "_modules"),
    ],
)
def test_a_module_whose_copy_would_compute_with_its_weights_is_refused_and_left_as_it_was(
    build: Callable[[], nn.Module], place: str
) -> None:
    module = build()
    with pytest.raises(UnsupportedStateError, match=f"found that {place} in the copy still computes"):
        two_copies(module)
    assert module.training
    assert all(weight.requires_grad for weight in module.parameters())


class WithItsOwnMethods(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act = self.first.forward
        self.other = partial(Net.forward, self)
        self.double = lambda x: 2 * x
        self.register_forward_hook(lambda module, given, found: found + module.other(given[0]))
        self.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        assert module is self
        return given[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double(self.act(x))  # type: ignore[no-any-return]


def torchscript() -> nn.Module:
    return torch.jit.script(Net())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(("build", "factor"), [(WithItsOwnMethods, 6.0), (torchscript, 2.0)])
def test_code_that_goes_with_the_module_and_torchscript_follow_the_weights(
    build: Callable[[], nn.Module], factor: float, tmp_path: Path
) -> None:
    save(tmp_path, 1, module=stamp(Net(), 1))
    with unbroken.watch(tmp_path, build(), every_seconds=0.002, wait_seconds=0) as live:
        for step in (2, 3):
            save(tmp_path, step, module=stamp(Net(), step))
            eventually(lambda step=step: live.checkpoint.step == step)
            assert torch.equal(live(torch.ones(1, 2)), torch.full((1, 2), factor * step))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_module_that_cannot_be_copied_is_an_error_that_says_why() -> None:
    module = nn.utils.weight_norm(nn.Linear(2, 2))
    with pytest.raises(UnsupportedStateError, match="graph leaves") as raised:
        two_copies(module)
    assert "parametrizations" in str(raised.value.hint)
    assert module.training


@pytest.mark.chaos
def test_code_compiled_in_the_place_of_forward_is_refused_and_in_that_of_a_function_is_not() -> None:
    model: Any = Net()
    model.act = torch.compile(lambda x: x + 1, backend="eager")
    model.act(model(torch.ones(1, 2)))
    two_copies(model)
    model.compile(backend="eager")
    model(torch.ones(1, 2))
    two_copies(model)
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(UnsupportedStateError, match="found that forward in the copy"):
        two_copies(model)
