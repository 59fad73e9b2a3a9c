"""Keys: names are those of the user's model, whatever was wrapped around it, then or now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unbroken import CheckpointStore
from unbroken.errors import StateMismatchError

from ..some import named, some
from . import broken
from .scenes import Broken, Brokens, fails, restore, save, train


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def compiled_inside(seed: int) -> nn.Module:
    model = plain(seed)
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    return model


def parallel_inside(seed: int) -> nn.Module:
    model = plain(seed)
    model[2] = nn.DataParallel(model[2])
    return model


WRAPPED: dict[str, Callable[[int], Any]] = {
    "plain": plain,
    "parallel": lambda seed: nn.DataParallel(plain(seed)),
    "compiled": lambda seed: torch.compile(plain(seed)),
    "parallel of compiled": lambda seed: nn.DataParallel(torch.compile(plain(seed))),  # type: ignore[arg-type]
    "compiled of parallel": lambda seed: torch.compile(nn.DataParallel(plain(seed))),
    "compiled inside": compiled_inside,
    "parallel inside": parallel_inside,
}


class TestWrappers:
    """All keys missing and unexpected after compilation was turned on (karpathy/nanoGPT#325)."""

    def play(self, directory: Path, saved: str, restored: list[str], wrong: Brokens) -> None:
        model = WRAPPED[saved](1)
        # With an optimizer whose moments have names as well.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.rand_like(parameter)
        save(directory, wrong, model=model, optimizer=optimizer)
        for name in restored:
            again = WRAPPED[name](2)
            other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
            restore(directory, wrong, model=again, optimizer=other)
            for one, two in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(one, two)
                assert torch.equal(
                    optimizer.state[one]["momentum_buffer"], other.state[two]["momentum_buffer"]
                )

    @pytest.mark.parametrize("saved", some(named(WRAPPED), one_in=2))
    def test_a_model_in_any_wrapping_is_restored_into_any_other(self, tmp_path: Path, saved: str) -> None:
        self.play(tmp_path, saved, list(WRAPPED), ())

    @pytest.mark.parametrize("saved", [name for name in WRAPPED if name != "plain"])
    def test_it_is_not_where_prefixes_are_kept_and_loaded_as_they_match(
        self, tmp_path: Path, saved: str
    ) -> None:
        with fails():
            self.play(tmp_path, saved, ["plain"], (broken.NonStrict,))


class Foreign(nn.Module):
    """Holds the same layers under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = plain(1)


class TestForeignNames:
    """163 missing keys, no error, random weights (FareedKhan-dev/train-llm-from-scratch#36)."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        save(directory, wrong, model=Foreign())
        model = plain(2)
        before = model[0].weight.clone()
        with pytest.raises(StateMismatchError) as refused:
            restore(directory, wrong, model=model)
        for name in ("0.weight", "2.bias", "other.0.weight", "other.2.bias"):
            assert f"model: {name}: " in refused.value.message
        with pytest.raises(StateMismatchError, match="nothing in it fits"):
            restore(directory, wrong, model=model, allow=["model.*"])
        assert torch.equal(model[0].weight, before)

    def test_names_that_do_not_match_are_refused_and_none_at_all_even_if_that_is_allowed(
        self, tmp_path: Path
    ) -> None:
        self.play(tmp_path, ())

    def test_they_are_not_where_a_model_is_loaded_as_it_matches(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.NonStrict,))

    def test_what_is_allowed_is_counted_in_the_report(self, tmp_path: Path) -> None:
        save(tmp_path, model=plain(1))
        larger = plain(2).append(nn.Linear(2, 2))
        lines = restore(tmp_path, model=larger, allow=["model.3.*"])
        assert any("2 missing in the checkpoint" in line for line in lines)
        assert any("model: 4 tensors restored" in line for line in lines)
        assert torch.equal(larger[0].weight, plain(1)[0].weight)

    def rename(self, directory: Path, wrong: Brokens) -> None:
        foreign = Foreign()
        save(directory, wrong, model=foreign)
        model = plain(2)
        restore(directory, wrong, model=model, rename={"model.other": "model"})
        assert all(map(torch.equal, foreign.parameters(), model.parameters()))

    def test_a_map_of_names_brings_them_together(self, tmp_path: Path) -> None:
        self.rename(tmp_path, ())

    def test_it_does_not_where_the_handler_is_deaf_to_it(self, tmp_path: Path) -> None:
        with fails():
            self.rename(tmp_path, (broken.DeafToRenaming,))


class TestTiedWeights:
    """Saved once under one of two names, missing under the other (huggingface/accelerate#2875)."""

    def built(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = self.built(1)
        train(parts["model"], parts["optimizer"], range(2))
        save(directory, wrong, **parts)
        tensors = CheckpointStore(directory).latest().manifest.tensors
        assert tensors["model/0.weight"].aliases == ("model/2.weight",)
        assert "model/2.weight" not in tensors
        expected = train(parts["model"], parts["optimizer"], range(2, 5))
        again = self.built(2)
        restore(directory, wrong, **again)
        assert again["model"][0].weight is again["model"][2].weight
        assert train(again["model"], again["optimizer"], range(2, 5)) == expected
        assert torch.equal(again["model"][2].weight, parts["model"][0].weight)

    def test_they_are_kept_once_come_back_under_both_names_and_stay_tied(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    @pytest.mark.parametrize("wrong", [broken.EachNameAlone, broken.ByAssignment])
    def test_they_do_not_where_each_name_is_a_tensor_of_its_own(self, tmp_path: Path, wrong: Broken) -> None:
        with fails():
            self.play(tmp_path, (wrong,))
