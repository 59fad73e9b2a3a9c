"""Optimizers that keep more than torch's do, and what comes with another release, module or dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import StateMismatchError

from .runs import restore


class SlowWeights(torch.optim.SGD):
    """Keeps weights and a count outside of `state`, and says so by `state_dict()`."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.slow = [item.detach().clone() for group in self.param_groups for item in group["params"]]
        self.count = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1
        if self.count % 3 == 0:
            parameters = [item for group in self.param_groups for item in group["params"]]
            with torch.no_grad():
                for slow, fast in zip(self.slow, parameters, strict=True):
                    slow.add_(fast - slow, alpha=0.5)
                    fast.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.slow, self.count = state.pop("slow"), state.pop("count")
        super().load_state_dict(state)


class Counting(torch.optim.Adagrad):
    """Counts in `state`, beside what it keeps of parameters."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["count"] = self.state.get("count", 0) + 1


class Estimating(torch.optim.SGD):
    """Makes an option of its groups while it steps, as optimizers that find their own rate do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 0.0) + 1
            group["history"] = group.get("history", torch.zeros(2)) + 0.5
        super().step(closure)


def train(model: nn.Module, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    loss = (model(torch.full((2, 4), float(number), dtype=dtype)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses(directory: Path, make: Any, cuts: list[int], **options: Any) -> list[float]:
    found = []
    for cut in cuts:
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        optimizer = make(model.parameters())
        with unbroken.Run(directory, model=model, optimizer=optimizer, **options) as run:
            while run.step_count < cut:
                found.append(train(model, optimizer, run.step_count + 1))
                run.step()
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SlowWeights(parameters, lr=0.01, momentum=0.9),
        lambda parameters: Counting(parameters, lr=0.01),
        lambda parameters: Estimating(parameters, lr=0.01),
    ],
    ids=["own state_dict", "other keys", "options made by step"],
)
def test_one_that_keeps_more_goes_on_as_if_it_had_never_stopped(tmp_path: Path, make: Any) -> None:
    assert losses(tmp_path / "cut", make, [2, 4, 7]) == losses(tmp_path / "whole", make, [7])


def test_what_it_keeps_beside_its_parameters_is_restored(tmp_path: Path) -> None:
    losses(tmp_path, lambda parameters: Counting(parameters, lr=0.01), [3])
    model = nn.Linear(4, 4)
    optimizer = Counting(model.parameters(), lr=0.01)
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer):
        assert optimizer.state["count"] == 3  # type: ignore[index]


def test_loading_its_own_state_keeps_the_groups_that_others_hold(tmp_path: Path) -> None:
    losses(tmp_path, lambda parameters: SlowWeights(parameters, lr=0.01), [2])
    model = nn.Linear(4, 4)
    optimizer = SlowWeights(model.parameters(), lr=0.01)
    group = optimizer.param_groups[0]
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer):
        assert optimizer.param_groups[0] is group
        assert optimizer.count == 2


def test_a_state_dict_that_is_new_in_the_script_is_refused_until_it_is_allowed(tmp_path: Path) -> None:
    class Plain(torch.optim.SGD):
        pass

    class Own(SlowWeights):
        pass

    Plain.__qualname__ = Own.__qualname__ = "Mine"
    losses(tmp_path, lambda parameters: Plain(parameters, lr=0.01), [2])
    with pytest.raises(StateMismatchError, match="slow: the checkpoint lacks it"):
        losses(tmp_path, lambda parameters: Own(parameters, lr=0.01), [3])
    losses(tmp_path, lambda parameters: Own(parameters, lr=0.01), [3], allow=["optimizer.*"])


class TestOptions:
    def changed(self, directory: Path, optimizer: Any, model: nn.Module) -> list[str]:
        with unbroken.Run(directory, model=model, optimizer=optimizer) as run:
            assert run.restored is not None
            return list(run.restored.changed)

    def test_one_of_the_script_alone_is_used_and_said(self, tmp_path: Path) -> None:
        losses(tmp_path, lambda parameters: torch.optim.SGD([{"params": parameters}], lr=0.01), [1])
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "name": "all"}], lr=0.01)
        assert self.changed(tmp_path, optimizer, model) == [
            "optimizer: group 0 name: 'all' of the script is used, the checkpoint has no such option"
        ]
        assert optimizer.param_groups[0]["name"] == "all"

    def test_a_release_of_torch_with_another_option_is_no_obstacle(self, tmp_path: Path) -> None:
        def older(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(parameters)
            del optimizer.param_groups[0]["maximize"]
            return optimizer

        losses(tmp_path, older, [0])
        model = nn.Linear(4, 4)
        (line,) = self.changed(tmp_path, torch.optim.Adam(model.parameters()), model)
        assert "maximize: False of the script is used" in line

    def test_one_that_the_loop_made_is_kept_and_said(self, tmp_path: Path) -> None:
        found: list[Any] = []
        for _ in range(2):
            model = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
                found.append(optimizer.param_groups[0].get("lr_scale"))
                if run.restored is not None:
                    assert any("lr_scale: 0.5 is kept" in line for line in run.restored.changed)
                optimizer.param_groups[0]["lr_scale"] = 0.5
                run.step()
        assert found == [None, 0.5]

    def test_a_tensor_of_another_dtype_keeps_the_kind_of_the_script(self, tmp_path: Path) -> None:
        losses(tmp_path, lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.5)), [1])
        model = nn.Linear(4, 4)
        rate = torch.tensor(0.5, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        (line,) = self.changed(tmp_path, optimizer, model)
        assert "a Tensor of torch.float64 and shape () as in the script" in line


class TestCast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("name", ["Adam", "SGD", "NAdam", "Adafactor", "LBFGS"])
    def test_what_an_optimizer_keeps_follows_its_parameters_and_training_goes_on(
        self, tmp_path: Path, name: str, dtype: torch.dtype
    ) -> None:
        def make(parameters: Any) -> Any:
            options = {"momentum": 0.9} if name == "SGD" else {}
            return getattr(torch.optim, name)(parameters, lr=0.01, **options)

        def step(model: nn.Module, optimizer: Any) -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)) ** 2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        model = nn.Linear(4, 4)
        optimizer = make(model.parameters())
        with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
            step(model, optimizer)
            run.step()
        again = nn.Linear(4, 4, dtype=dtype)
        other = make(again.parameters())
        with unbroken.Run(tmp_path, model=again, optimizer=other, cast=["weight", "bias"]) as run:
            kinds = {
                item.dtype
                for entries in other.state.values()
                for item in entries.values()
                if isinstance(item, torch.Tensor) and item.dim()
            }
            assert kinds == {dtype}
            assert run.restored is not None
            assert run.restored.as_json()["parts"]["optimizer"]["dtype"]["tensors"] > 0
            step(again, other)
            run.step()

    def test_of_an_optimizer_that_is_not_known_it_is_refused(self, tmp_path: Path) -> None:
        losses(tmp_path, lambda parameters: SlowWeights(parameters, lr=0.01, momentum=0.9), [2])
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        optimizer = SlowWeights(model.parameters(), lr=0.01, momentum=0.9)
        with pytest.raises(StateMismatchError, match="how a SlowWeights goes on with that is not known"):
            restore(tmp_path, model=model, optimizer=optimizer, cast=["*"])


class TestMovedClasses:
    def moved(self, module: str) -> Any:
        return type("Counting", (torch.optim.Adagrad,), {"__module__": module})

    def test_one_that_has_moved_to_another_module_is_the_same_and_it_is_said(self, tmp_path: Path) -> None:
        losses(tmp_path, self.moved("__main__"), [2])
        model = nn.Linear(4, 4)
        with unbroken.Run(tmp_path, model=model, optimizer=self.moved("mine.opt")(model.parameters())) as run:
            assert run.restored is not None
            assert run.restored.changed == (
                "optimizer: class mine.opt.Counting: taken for __main__.Counting of the checkpoint, moved to "
                "another module",
            )

    def test_one_of_torch_is_not_the_same_as_one_of_that_name_elsewhere(self, tmp_path: Path) -> None:
        losses(tmp_path, torch.optim.Adagrad, [2])
        other = type("Adagrad", (torch.optim.Adagrad,), {"__module__": "mine.opt"})
        with pytest.raises(StateMismatchError, match=r"class mine\.opt\.Adagrad, the checkpoint has class"):
            losses(tmp_path, other, [3])
