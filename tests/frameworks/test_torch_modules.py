"""Modules: what is kept beside the state_dict, what is restored where a state fits in part, other names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unbroken.errors import UsageError
from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.modules import ModuleHandler, check_non_persistent
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.state.choices import Choices
from unbroken.state.tree import LeafCodec
from unbroken.testing.handler_contract import (
    Change,
    HandlerContract,
    Make,
    Parts,
    loaded,
    saved,
)


def run_codecs() -> list[LeafCodec]:
    return [NumpyCodec(), TorchCodec()]


class Counting(nn.Module):
    """Counts in every kind of plain attribute; `size` and `name` are settings."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.size, self.name, self.shape = size, "counting", (size, 2)
        self.calls, self.mean, self.recent = 0, 0.0, deque([0.0], maxlen=2)
        self.seen: set[int] = set()
        self.totals: dict[str, float] = {}
        self.history: list[float] = []
        self.weight = nn.Parameter(torch.zeros(size))

    def count(self) -> None:
        self.calls += 1
        self.mean = np.float64(self.mean * 0.5 + self.calls)  # type: ignore[assignment]
        self.recent.append(self.mean)
        self.seen.add(self.calls)
        self.totals[f"step {self.calls}"] = float("nan")
        self.history.append(self.mean)
        self.late = (self.calls, True)
        with torch.no_grad():
            self.weight.add_(self.calls)


class TestCounters(HandlerContract):
    @pytest.fixture
    def handler(self) -> ModuleHandler:
        return ModuleHandler()

    @pytest.fixture
    def make(self, handler: ModuleHandler) -> Make:
        def build() -> nn.Module:
            model = nn.Sequential(Counting(), nn.Dropout(0.25))
            # A run looks at its parts when it is entered.
            handler.state(model)
            return model

        return build

    @pytest.fixture
    def change(self) -> Change:
        def train(model: Any) -> None:
            model[0].count()
            model[1].p = 0.5

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda model: [
            *model.parameters(),
            model[0].recent,
            model[0].seen,
            model[0].totals,
            model[0].history,
        ]

    def test_what_did_not_change_is_not_in_the_state(self, handler: ModuleHandler, make: Make) -> None:
        model = make()
        assert "(attributes)" not in handler.state(model)  # type: ignore[operator]
        model[0].count()
        state: Any = handler.state(model)
        assert list(state["(attributes)"]) == ["0"]
        assert not {"size", "name", "shape"} & state["(attributes)"]["0"].keys()

    def test_settings_of_the_script_stay_as_the_script_has_them(self) -> None:
        first, second = ModuleHandler(), ModuleHandler()
        model, again = Counting(3), Counting(3)
        again.name = "renamed"
        first.state(model), second.state(again)
        model.count()
        second.restore(again, first.state(model))
        assert (again.name, again.calls) == ("renamed", 1)

    def test_what_was_a_counter_stays_one_when_it_comes_back_to_where_it_began(self) -> None:
        handler, model = ModuleHandler(), Counting()
        handler.state(model)
        for calls in (1, 0):
            model.calls = calls
            state: Any = handler.state(model)
        assert state["(attributes)"] == {"": {"calls": 0}}


class Rotary(nn.Module):
    """A cache that grows, as those of positions do, and a buffer that is changed in place."""

    cos: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(2), persistent=False)
        self.register_buffer("total", torch.zeros(2), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.longest = 2
        self.loose: torch.Tensor | None = None

    def grow(self) -> None:
        self.longest += 1
        self.cos = torch.full((self.longest,), float(self.longest))
        self.total += 1


class TestNonPersistent(HandlerContract):
    @pytest.fixture
    def parts(self) -> dict[str, object]:
        return {"model": nn.ModuleDict({"rope": Rotary()})}

    @pytest.fixture
    def handler(self, parts: dict[str, object]) -> ModuleHandler:
        return ModuleHandler(parts, Choices(non_persistent=("model.rope.*",)))

    @pytest.fixture
    def make(self, handler: ModuleHandler, parts: dict[str, object]) -> Make:
        def build() -> nn.Module:
            model = parts["model"] = nn.ModuleDict({"rope": Rotary()})
            handler.state(model)
            return model

        return build

    @pytest.fixture
    def change(self) -> Change:
        return lambda model: model["rope"].grow()

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return run_codecs()

    @pytest.fixture
    def inner(self) -> Parts:
        # The other one has another length.
        return lambda model: [model["rope"].total]

    # One after the other, since the part that `make` makes is known by its identity.
    def test_training_goes_on_as_if_it_had_never_stopped(  # type: ignore[override]
        self, handler: ModuleHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        first = make()
        change(first)
        kept = saved(handler, first, codecs)
        change(first)
        expected = saved(handler, first, codecs)
        second = make()
        handler.restore(second, loaded(kept, codecs))
        change(second)
        assert saved(handler, second, codecs) == expected


def test_a_pattern_that_stands_for_no_buffer_is_refused_with_those_there_are() -> None:
    parts = {"model": nn.ModuleDict({"rope": Rotary(), "norm": nn.BatchNorm1d(2)}), "n": {}}
    with pytest.raises(UsageError, match=r"found 'model\.norm\.\*'") as caught:
        ModuleHandler(parts, Choices(non_persistent=("model.rope.cos", "model.norm.*")))
    assert caught.value.hint == "there are model.rope.cos, model.rope.later, model.rope.total"
    with pytest.raises(UsageError) as caught:
        check_non_persistent({"n": {}}, ["*"])
    assert caught.value.hint == "no module has a non-persistent buffer"


class TestUnkeptChanges:
    def handler_of(self, model: nn.Module, *patterns: str) -> ModuleHandler:
        handler = ModuleHandler({"model": model}, Choices(non_persistent=patterns))
        handler.state(model)
        return handler

    def test_nothing_is_told_of_a_module_that_keeps_all_it_changes(self) -> None:
        model = nn.Sequential(Counting(), nn.BatchNorm1d(3))
        handler = self.handler_of(model)
        model[0].count()  # type: ignore[operator]
        model[1](torch.ones(2, 3))
        assert handler.unkept_changes(model) == []

    def test_buffers_tensors_and_large_containers_are_named(self) -> None:
        model = nn.ModuleDict({"rope": Rotary(), "other": Counting()})
        handler = self.handler_of(model)
        model["rope"].total.add_(1)  # type: ignore[operator]
        model["rope"].loose = torch.ones(3)
        model["other"].history += [0.0] * 101  # type: ignore[operator]
        assert handler.unkept_changes(model) == [
            "model.rope.loose: a tensor in a plain attribute that changes and is not kept",
            "model.rope.total: a non-persistent buffer that changes and is not kept",
            "model.other.history: a list of 101 items that changes and is not kept",
        ]

    def test_a_length_beside_a_cache_is_kept_only_together_with_the_cache(self) -> None:
        model = nn.ModuleDict({"rope": Rotary()})
        handler = self.handler_of(model)
        model["rope"].grow()  # type: ignore[operator]
        assert "(attributes)" not in handler.state(model)  # type: ignore[operator]
        assert (
            "model.rope.longest: a plain attribute beside cos that changes and is not kept"
            in handler.unkept_changes(model)
        )
        model = nn.ModuleDict({"rope": Rotary()})
        handler = self.handler_of(model, "model.rope.*")
        model["rope"].grow()  # type: ignore[operator]
        state: Any = handler.state(model)
        assert state["(attributes)"] == {"rope": {"longest": 3}}
        assert handler.unkept_changes(model) == []

    def test_after_a_restore_only_what_changes_from_there_on_is_told(self) -> None:
        model = nn.ModuleDict({"rope": Rotary()})
        handler = self.handler_of(model)
        state = handler.state(model)
        model["rope"].total.add_(1)  # type: ignore[operator]
        handler.restore(model, state)
        assert handler.unkept_changes(model) == []


class TestStatesThatFitInPart:
    def test_what_fits_is_restored_in_place_and_the_rest_is_left_alone(self) -> None:
        handler = ModuleHandler()
        old = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3), "gone": nn.Linear(1, 1)})
        new = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 4), "added": nn.BatchNorm1d(2)})
        new["added"].weight.requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
        found = handler.differences(new, handler.state(old))
        assert {(one.kind, one.name) for one in found} == {
            *(("missing", f"added.{name}") for name in nn.BatchNorm1d(2).state_dict()),
            ("unexpected", "gone.weight"),
            ("unexpected", "gone.bias"),
            ("shape", "b.weight"),
            ("shape", "b.bias"),
        }
        place = new["a"].weight.data_ptr()
        handler.restore(new, handler.state(old))
        assert torch.equal(new["a"].weight, old["a"].weight)
        assert new["a"].weight.data_ptr() == place
        assert not new["added"].weight.requires_grad
        for name, tensor in new.state_dict().items():
            assert name.startswith("a.") or torch.equal(tensor, before[name])

    def test_another_dtype_is_cast(self) -> None:
        handler = ModuleHandler()
        old, new = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)
        assert [one.kind for one in handler.differences(new, handler.state(old))] == ["dtype", "dtype"]
        handler.restore(new, handler.state(old))
        assert torch.equal(new.weight, old.weight.bfloat16())
        assert new.weight.dtype is torch.bfloat16

    def test_a_counter_of_a_module_that_is_gone_is_a_difference(self) -> None:
        handler = ModuleHandler()
        old = nn.ModuleDict({"count": Counting()})
        handler.state(old)
        old["count"].calls = 5  # type: ignore[assignment]
        found = handler.differences(nn.ModuleDict(), handler.state(old))
        assert ("unexpected", "count.calls") in {(one.kind, one.name) for one in found}

    @pytest.mark.parametrize(
        "build",
        [
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
            lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
            lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3))),
        ],
        ids=["weight_norm", "spectral_norm", "orthogonal", "old spectral_norm", "script"],
    )
    def test_parametrized_modules_are_restored_bit_for_bit(self, build: Callable[[], nn.Module]) -> None:
        handler, codecs = ModuleHandler(), run_codecs()
        model, again = build(), build()
        for _ in range(3):
            model(torch.randn(2, 3)).sum().backward()
        kept = saved(handler, model, codecs)
        assert handler.differences(again, loaded(kept, codecs)) == []
        handler.restore(again, loaded(kept, codecs))
        assert saved(handler, again, codecs) == kept
        assert torch.equal(again(torch.ones(2, 3)), model(torch.ones(2, 3)))

    def test_the_versions_that_modules_give_their_layouts_are_known_to_them(self) -> None:
        class Versioned(nn.Linear):
            _version = 2

            def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
                assert metadata.get("version") == 2
                super()._load_from_state_dict(state, prefix, metadata, *rest)

        handler, model, again = ModuleHandler(), Versioned(2, 2), Versioned(2, 2)
        handler.restore(again, handler.state(model))
        assert torch.equal(model.weight, again.weight)

    def test_an_expanded_buffer_gets_memory_for_each_element(self) -> None:
        class Expanded(nn.Module):
            def __init__(self, value: float) -> None:
                super().__init__()
                self.register_buffer("mask", torch.full((1,), value).expand(4))

        handler, model, again = ModuleHandler(), Expanded(1.0), Expanded(0.0)
        handler.restore(again, loaded(saved(handler, model, run_codecs()), run_codecs()))
        assert again.mask.tolist() == [1.0] * 4  # type: ignore[union-attr,operator]
