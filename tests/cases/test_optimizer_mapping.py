"""Optimizers: moments belong to parameters by their names, and another optimizer is another thing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unbroken.errors import StateMismatchError

from . import broken
from .scenes import Broken, Brokens, fails, restore, save, train


class Layers(nn.Module):
    """Two layers that are used in one order and defined in another."""

    def __init__(self, order: Sequence[str], **widths: int) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(widths.get(name, 4), 4))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(inputs)))


def built(order: Sequence[str], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Layers(order)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}


class TestOrder:
    """Two layers change places in the code (pytorch/pytorch#1489)."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = built(["first", "second"], seed=1)
        train(parts["model"], parts["optimizer"], range(3))
        save(directory, wrong, **parts)
        expected = train(parts["model"], parts["optimizer"], range(3, 9))
        again = built(["second", "first"], seed=2)
        restore(directory, wrong, **again)
        assert train(again["model"], again["optimizer"], range(3, 9)) == expected

    def test_training_goes_on_where_two_layers_of_equal_shape_have_changed_places(
        self, tmp_path: Path
    ) -> None:
        self.play(tmp_path, ())

    def test_it_goes_astray_where_moments_are_mapped_by_position(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.OptimizersOwnState,))

    def test_layers_that_exchanged_their_shapes_are_refused_by_name_before_anything_changes(
        self, tmp_path: Path
    ) -> None:
        def widths(first: int, second: int) -> dict[str, Any]:
            model = Layers(["first", "second"], first=first, second=second)
            return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

        save(tmp_path, **widths(3, 4))
        again = widths(4, 3)
        before = [weight.clone() for weight in again["model"].parameters()]
        with pytest.raises(StateMismatchError, match=r"first\.weight") as refused:
            restore(tmp_path, **again)
        assert "second.weight" in refused.value.message
        assert all(map(torch.equal, before, again["model"].parameters()))
        assert not again["optimizer"].state


class TestAnotherOptimizer:
    """An Adam checkpoint in an SGD optimizer loads, and fails at the first step (pytorch/pytorch#7499)."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = built(["first", "second"], seed=1)
        train(parts["model"], parts["optimizer"], range(3))
        save(directory, wrong, **parts)
        sgd = torch.optim.SGD(parts["model"].parameters(), lr=0.1, momentum=0.9)
        options = {key: item for key, item in sgd.param_groups[0].items() if key != "params"}
        with pytest.raises(StateMismatchError, match=r"class torch\.optim\.sgd\.SGD, the checkpoint has"):
            restore(directory, wrong, model=parts["model"], optimizer=sgd)
        assert not sgd.state
        assert {key: sgd.param_groups[0][key] for key in options} == options
        # Which a careless restore would have filled with settings of Adam.
        assert "betas" not in sgd.param_groups[0]

    def test_another_class_is_refused_before_any_step(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_is_not_where_the_optimizer_judges_by_itself(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.OptimizersOwnState,))

    def test_the_script_may_begin_with_a_fresh_optimizer_and_the_report_says_so(self, tmp_path: Path) -> None:
        parts = built(["first", "second"], seed=1)
        train(parts["model"], parts["optimizer"], range(3))
        save(tmp_path, **parts)
        expected = [weight.clone() for weight in parts["model"].parameters()]
        again = built(["first", "second"], seed=2)
        sgd = torch.optim.SGD(again["model"].parameters(), lr=0.1, momentum=0.9)
        lines = restore(tmp_path, model=again["model"], optimizer=sgd, fresh=["optimizer"])
        assert "optimizer: begins as the script built it" in lines
        assert all(map(torch.equal, expected, again["model"].parameters()))
        assert not sgd.state


FLAVOURS: list[dict[str, bool]] = [{}, {"fused": True}, {"foreach": True}, {"foreach": False}]


class TestFlavours:
    """With fused or capturable Adam a resume fails at its first step (pytorch/pytorch#103256)."""

    def built(self, flavour: dict[str, bool], seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Layers(["first", "second"])
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05, **flavour)}

    def play(
        self,
        directory: Path,
        saved: dict[str, bool],
        flavour: dict[str, bool],
        wrong: Brokens,
        *,
        counts_are_numbers: bool = False,
    ) -> None:
        parts = self.built(saved, 1)
        train(parts["model"], parts["optimizer"], range(3))
        if counts_are_numbers:
            # As releases of old kept them.
            for entries in parts["optimizer"].state.values():
                entries["step"] = 3
        save(directory, wrong, **parts)
        for entries in parts["optimizer"].state.values():
            entries["step"] = torch.tensor(3.0)
        train(parts["model"], parts["optimizer"], range(3, 4))
        again = self.built(flavour, 2)
        restore(directory, wrong, **again)
        train(again["model"], again["optimizer"], range(3, 4))
        # Flavours add in another order; a forgotten moment or count would show in the first digits.
        for one, two in zip(parts["model"].parameters(), again["model"].parameters(), strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
            assert float(again["optimizer"].state[two]["step"]) == 4
        for key, item in flavour.items():
            assert again["optimizer"].param_groups[0][key] is item

    @pytest.mark.parametrize("saved", FLAVOURS, ids=str)
    @pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
    def test_a_run_goes_on_in_any_flavour_whichever_it_was_saved_in(
        self, tmp_path: Path, saved: dict[str, bool], flavour: dict[str, bool]
    ) -> None:
        self.play(tmp_path, saved, flavour, ())

    @pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
    def test_counts_of_steps_that_were_kept_as_numbers_fit_every_flavour(
        self, tmp_path: Path, flavour: dict[str, bool]
    ) -> None:
        self.play(tmp_path, {}, flavour, (), counts_are_numbers=True)

    @pytest.mark.parametrize("wrong", [broken.OptimizersOwnState, broken.NoStepCounts])
    def test_it_does_not_where_the_file_decides_the_flavour_or_counts_are_lost(
        self, tmp_path: Path, wrong: Broken
    ) -> None:
        with fails():
            self.play(tmp_path, {}, {"fused": True}, (wrong,))


class TestAddedGroups:
    """A run that unfreezes layers cannot be resumed (Lightning-AI/pytorch-lightning#6891)."""

    def built(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Layers(["first", "second"])
        return {"model": model, "optimizer": torch.optim.Adam(model.second.parameters(), lr=0.05)}

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = self.built(1)
        train(parts["model"], parts["optimizer"], range(5))
        parts["optimizer"].add_param_group({"params": list(parts["model"].first.parameters()), "lr": 0.01})
        train(parts["model"], parts["optimizer"], range(5, 8))
        save(directory, wrong, **parts)
        expected = train(parts["model"], parts["optimizer"], range(8, 12))
        again = self.built(2)
        lines = restore(directory, wrong, **again)
        assert any("group 1 (2 parameters from model.first" in line for line in lines)
        assert train(again["model"], again["optimizer"], range(8, 12)) == expected

    def test_a_group_that_was_added_while_training_ran_is_added_again(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_is_not_where_the_optimizer_loads_by_itself(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="different number of parameter groups"):
            self.play(tmp_path, (broken.OptimizersOwnState,))

    def test_without_its_parameters_the_group_is_named_and_refused(self, tmp_path: Path) -> None:
        parts = self.built(1)
        added = nn.Linear(4, 4)
        parts["optimizer"].add_param_group({"params": list(added.parameters())})
        save(tmp_path, **parts, added=added)
        again = self.built(2)
        with pytest.raises(StateMismatchError, match=r"group 1 was added .* its parameter added\.weight"):
            restore(tmp_path, **again, allow=["added"])
        assert len(again["optimizer"].param_groups) == 1
