"""A part that begins anew does so once, and again when it is another one; the report counts what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import StateMismatchError


def run_with(directory: Path, optimizer: Any, model: nn.Module, **options: Any) -> dict[str, Any]:
    """Train for a step; return what the report says of the optimizer."""
    with unbroken.Run(directory, model=model, optimizer=optimizer, **options) as run:
        report = run.restored.as_json()["parts"]["optimizer"] if run.restored is not None else {}
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        run.step()
    return report


def test_one_class_after_another_may_take_the_place_while_the_choice_stays(tmp_path: Path) -> None:
    found = []
    for name in ("SGD", "Adam", "Adam", "RMSprop", "RMSprop"):
        model = nn.Linear(2, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        found.append(run_with(tmp_path, optimizer, model, fresh=["optimizer"]).get("fresh"))
    assert found == [None, True, False, True, False]


def test_so_may_one_of_the_same_class_that_does_not_fit(tmp_path: Path) -> None:
    found = []
    for groups in (2, 1, 1):
        model = nn.Linear(2, 2)
        split = [[model.weight], [model.bias]] if groups == 2 else [[model.weight, model.bias]]
        optimizer = torch.optim.Adam([{"params": params} for params in reversed(split)], lr=0.1)
        found.append(run_with(tmp_path, optimizer, model, fresh=["optimizer"]).get("fresh"))
    assert found == [None, True, False]


class TestCounts:
    def build(self, classes: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, classes))
        return model, torch.optim.Adam(model.parameters())

    def test_all_tensors_of_a_parameter_are_counted_where_it_does_not_fit(self, tmp_path: Path) -> None:
        model, optimizer = self.build()
        run_with(tmp_path, optimizer, model)
        model, optimizer = self.build(7)
        found = run_with(tmp_path, optimizer, model, allow=["model.1.*"])
        # A step and two moments each.
        assert found["shape"] == {"tensors": 6, "bytes": 2 * 4 + 2 * 4 * (12 + 3)}
        assert found["matched"] == {"tensors": 6, "bytes": 2 * 4 + 2 * 4 * (16 + 4)}

    def test_a_part_that_is_gone_is_counted_as_left_out(self, tmp_path: Path) -> None:
        model, other = nn.Linear(4, 4), nn.Linear(8, 8)
        with unbroken.Run(tmp_path, model=model, other=other) as run:
            run.step()
        with unbroken.Run(tmp_path, model=model, allow=["other"]) as run:
            assert run.restored is not None
            found = run.restored.as_json()["parts"]["other"]
        assert found["unexpected"] == {"tensors": 2, "bytes": 288}
        assert found["matched"] == {"tensors": 0, "bytes": 0}

    def test_an_optimizer_of_which_nothing_fits_is_refused_whatever_is_allowed(self, tmp_path: Path) -> None:
        def build(trained: str) -> dict[str, Any]:
            model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(2, 2)})
            return {"model": model, "optimizer": torch.optim.Adam(model[trained].parameters())}

        run_with(tmp_path, **build("a"))
        with pytest.raises(StateMismatchError, match="optimizer: nothing in it fits"):
            run_with(tmp_path, **build("b"), allow=["*"])
