"""The state of a module under other names, as a program needs it that has renamed its modules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from unbroken.errors import UsageError
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.state.table import TensorTable
from unbroken.state.tree import Decoder, Encoder, join
from unbroken.testing.handler_contract import saved_again

from .test_torch_modules import Counting, run_codecs


class Extra(nn.Module):
    """Keeps a tensor in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2)

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class TestRenaming:
    def model(self, first: str) -> nn.ModuleDict:
        model = nn.ModuleDict(
            {first: nn.Linear(2, 2), "head": nn.Linear(2, 2), "x": Counting(), "e": Extra()}
        )
        model["head"].weight = model[first].weight  # type: ignore[assignment]
        return model

    def encoded(self, model: nn.Module, handler: ModuleHandler) -> tuple[Any, TensorTable]:
        table = TensorTable()
        encoder = Encoder(table, run_codecs(), keep_aliases=True)
        state = encoder.encode(handler.state_inside_step(model), "model")
        return msgspec.json.decode(msgspec.json.encode(state)), table

    def trained(self) -> tuple[Any, TensorTable]:
        model, handler = self.model("body"), ModuleHandler()
        handler.state(model)
        model["body"].bias.requires_grad_(False)
        model["body"].eval()
        model["x"].count()  # type: ignore[operator]
        model["head"](torch.ones(1, 2)).sum().backward()
        return self.encoded(model, handler)

    def rename(self, name: str) -> str:
        for old, new in (("model.body.", "model.trunk."), ("model.x.", "model.y.z.")):
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def test_names_of_tensors_flags_counters_and_gradients_are_renamed_together(self) -> None:
        state, table = self.trained()
        renamed = ModuleHandler().renamed("model", state, self.rename)
        assert renamed.state["trunk.weight"] == renamed.state["head.weight"] == state["body.weight"]
        assert renamed.paths["model/body.weight"] == "model/trunk.weight"
        assert renamed.state["(flags)"]["frozen"] == ["trunk.bias"]
        assert renamed.state["(flags)"]["evaluating"] == ["trunk"]
        assert renamed.state["(flags)"]["graded"] == ["head.bias", "trunk.weight"]
        assert renamed.state["(attributes)"].keys() == {"y.z"}
        assert renamed.state["(gradients)"].keys() == {"head.bias", "trunk.weight"}
        assert renamed.paths["model/(gradients)/body.weight"] == "model/(gradients)/trunk.weight"
        everything = {path for first, others in table.aliases.items() for path in (first, *others)}
        assert everything | table.sources.keys() <= renamed.paths.keys()
        assert renamed.paths["model/head.weight"] == "model/head.weight"
        assert renamed.paths["model/e._extra_state/scale"] == "model/e._extra_state/scale"

    def test_a_renamed_state_restores_a_renamed_module(self) -> None:
        state, table = self.trained()
        renamed = ModuleHandler().renamed("model", state, self.rename)
        kept = saved_again(table.sources, run_codecs()).tensors
        fresh = nn.ModuleDict(
            {
                "trunk": nn.Linear(2, 2),
                "head": nn.Linear(2, 2),
                "y": nn.ModuleDict({"z": Counting()}),
                "e": Extra(),
            }
        )
        fresh["head"].weight = fresh["trunk"].weight
        handler = ModuleHandler()
        handler.state(fresh)
        decoded = Decoder(lambda path: kept[join("part", path)], run_codecs()).decode(renamed.state)
        assert handler.differences(fresh, decoded) == []
        handler.restore(fresh, decoded)
        assert self.encoded(fresh, handler)[0] == self.referring(renamed.state, renamed.paths)

    def referring(self, state: Any, paths: dict[str, str]) -> Any:
        if isinstance(state, list):
            return [self.referring(item, paths) for item in state]
        if not isinstance(state, dict):
            return state
        if "$tensor" in state:
            return {**state, "$tensor": paths[state["$tensor"]]}
        return {key: self.referring(item, paths) for key, item in state.items()}

    def test_two_names_that_become_one_are_refused(self) -> None:
        state, _ = self.trained()
        with pytest.raises(UsageError, match=r"model\.head\.weight would both be called model\.head"):
            ModuleHandler().renamed("model", state, lambda name: name.replace("body", "head"))

    def test_a_name_that_leaves_its_part_is_refused(self) -> None:
        state, _ = self.trained()
        with pytest.raises(UsageError, match=r"stay in it, found that one becomes other\."):
            ModuleHandler().renamed("model", state, lambda name: name.replace("model.x", "other"))
