"""Dtypes and shapes: nothing is cast, nothing is broadcast, and a refusal changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unbroken.errors import StateMismatchError

from . import broken
from .scenes import Brokens, batch, fails, restore, save


class MasterWeights(torch.optim.Optimizer):
    """Trains weights of 16 bits by a copy and a moment of 32 bits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["moment"] = torch.zeros_like(state["master"])
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(group["lr"] * state["moment"])
                parameter.copy_(state["master"])


class TestMoments:
    """Moments in float32 come back in half precision (pytorch/pytorch#43706)."""

    def built(self) -> dict[str, Any]:
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        return {"model": model, "optimizer": MasterWeights(model.parameters())}

    def trained(self, parts: dict[str, Any], steps: range) -> list[Any]:
        for step in steps:
            parts["optimizer"].zero_grad()
            parts["model"](batch(step, 8, 4).bfloat16()).square().mean().backward()
            parts["optimizer"].step()
        return [
            (name, item.dtype, item.tolist())
            for parameter in parts["model"].parameters()
            for name, item in parts["optimizer"].state[parameter].items()
        ]

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = self.built()
        kept = self.trained(parts, range(3))
        assert {dtype for _, dtype, _ in kept} == {torch.float32}
        save(directory, wrong, **parts)
        expected = self.trained(parts, range(3, 6))
        again = self.built()
        restore(directory, wrong, **again)
        assert self.trained(again, range(0)) == kept
        assert self.trained(again, range(3, 6)) == expected

    def test_moments_of_32_bits_stay_so_for_weights_of_16(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_they_do_not_where_they_are_cast_to_the_dtype_of_their_weights(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.OptimizersOwnState,))


class TestWeightsOfAnotherDtype:
    """Half-precision weights are silently cast when they are loaded into a float32 model."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        save(directory, wrong, model=nn.Linear(3, 3, dtype=torch.bfloat16))
        model = nn.Linear(3, 3)
        before = model.weight.clone()
        dtypes = r"weight: dtype torch\.float32, the checkpoint has dtype torch\.bfloat16"
        with pytest.raises(StateMismatchError, match=dtypes):
            restore(directory, wrong, model=model)
        assert torch.equal(model.weight, before)

    def test_they_are_refused_tensor_by_tensor(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize("wrong", [broken.NonStrict, broken.Broadcasting])
    def test_they_are_not_where_loading_casts(self, tmp_path: Path, wrong: Any) -> None:
        with fails():
            self.play(tmp_path, (wrong,))

    def test_by_name_they_may_be_converted_and_the_report_says_so(self, tmp_path: Path) -> None:
        half = nn.Linear(3, 3, dtype=torch.bfloat16)
        save(tmp_path, model=half)
        model = nn.Linear(3, 3)
        lines = restore(tmp_path, model=model, cast=["model.*"])
        assert torch.equal(model.weight, half.weight.float())
        assert any("2 of another dtype, converted" in line for line in lines)


SHAPES = [((), (5,)), ((5,), ()), ((64, 1), (64, 32)), ((), (1,)), ((1,), ())]


class Holding(nn.Module):
    """One thing that fits, and one weight or buffer of the given shape."""

    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fits = nn.Parameter(torch.rand(3))
        if kind == "weight":
            self.odd = nn.Parameter(torch.rand(shape))
        else:
            self.register_buffer("odd", torch.rand(shape))


class TestShapes:
    """A tensor of another shape loads: its first element, or broadcast (pytorch/pytorch#165873)."""

    def play(self, directory: Path, kind: str, shapes: Any, wrong: Brokens) -> None:
        save(directory, wrong, model=Holding(kind, shapes[0]))
        model = Holding(kind, shapes[1])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(StateMismatchError) as refused:
            restore(directory, wrong, model=model)
        assert f"odd: shape {shapes[1]}, the checkpoint has shape {shapes[0]}" in refused.value.message
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("kind", ["weight", "buffer"])
    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    def test_another_shape_is_refused_and_nothing_is_half_applied(
        self, tmp_path: Path, kind: str, shapes: Any
    ) -> None:
        self.play(tmp_path, kind, shapes, ())

    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    def test_it_is_not_where_values_are_brought_into_shape(self, tmp_path: Path, shapes: Any) -> None:
        with fails():
            self.play(tmp_path, "weight", shapes, (broken.Broadcasting,))

    @pytest.mark.parametrize("part", ["array", "value"])
    def test_a_tensor_that_is_a_part_of_its_own_is_refused_as_well(self, tmp_path: Path, part: str) -> None:
        def made(*shape: int) -> Any:
            return torch.ones(shape) if part == "value" else torch.ones(shape).numpy()

        save(tmp_path, part=made(64, 1))
        live = made(64, 32)
        with pytest.raises(StateMismatchError, match=r"\(64, 32\).* the checkpoint .*\(64, 1\)"):
            restore(tmp_path, part=live)


class TestShapesOfMoments:
    """The state of an optimizer is not looked at until a step fails."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(5)
        save(directory, wrong, model=model, optimizer=optimizer)
        again = nn.Linear(3, 3)
        other = torch.optim.Adam(again.parameters())
        before = again.weight.clone()
        with pytest.raises(StateMismatchError, match=r"model\.weight: exp_avg has shape \(5,\)"):
            restore(directory, wrong, model=again, optimizer=other)
        assert torch.equal(again.weight, before)
        assert not other.state

    def test_a_moment_of_another_shape_is_refused_before_anything_changes(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_is_not_where_the_optimizer_loads_by_itself(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.OptimizersOwnState,))
