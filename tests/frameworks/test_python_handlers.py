"""What handlers of plain objects leave to others, keep of the script, and do with what removes or refuses."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.errors import StateMismatchError
from unbroken.frameworks.generators import is_generator
from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.state.python import ContainerHandler, DataclassHandler, StateDictHandler
from unbroken.state.tree import LeafCodec
from unbroken.testing.handler_contract import Change, HandlerContract, Make, Parts


def codecs_of_a_run() -> list[LeafCodec]:
    return [NumpyCodec(), TorchCodec()]


@dataclass
class Progress:
    n: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class TestDictionaryWithGenerators(HandlerContract):
    """Generators are kept elsewhere: the live ones stay, wherever they are."""

    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler(codecs_of_a_run(), is_generator)

    @pytest.fixture
    def make(self) -> Make:
        return lambda: {
            "n": 0,
            "rng": random.Random(1),
            "deep": [{"rng": np.random.default_rng(1)}, (torch.Generator(), torch.zeros(2))],
            "held": Holding(random.Random(2), 0),
            "counts": defaultdict(int, {"a": 1}),
        }

    @pytest.fixture
    def change(self) -> Change:
        def train(value: Any) -> None:
            value["n"] += 1
            value["deep"][1][1].add_(1)
            value["held"].n += 1
            value["counts"]["b"] += 1

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda value: [
            value["rng"],
            value["deep"][0]["rng"],
            *value["deep"][1],
            value["held"].rng,
        ]


@dataclass
class Holding:
    rng: random.Random
    n: int


class Tasks:
    """A dictionary from which training removes what the script has put in."""

    @staticmethod
    def build() -> dict[Any, Any]:
        return {"first": 0, 2: {"inner": 1, "other": 2}, "gone": {"deep": {"x": 1}}}

    @staticmethod
    def work(value: dict[Any, Any]) -> None:
        value[2]["other"] += 1
        value.pop("first", None)
        value[2].pop("inner", None)
        value.pop("gone", None)


class TestDictionaryThatShrinks(HandlerContract):
    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler()

    @pytest.fixture
    def make(self, handler: ContainerHandler) -> Make:
        def build() -> dict[Any, Any]:
            value = Tasks.build()
            # A run looks at its parts when it is entered.
            handler.state(value)
            return value

        return build

    @pytest.fixture
    def change(self) -> Change:
        return Tasks.work


def test_keys_that_only_the_script_has_stay_and_are_told_also_further_inside() -> None:
    first, second = ContainerHandler(), ContainerHandler()
    old = {"n": 1, "inner": {"a": 1, "gone": 2}}
    first.state(old)
    del old["inner"]["gone"]  # type: ignore[attr-defined]
    state = first.state(old)
    new: dict[str, Any] = {"n": 0, "best": float("inf"), "inner": {"a": 0, "gone": 2, "b": [1]}}
    second.state(new)
    assert [found.note for found in second.changed_settings(new, state)] == [
        "best: inf of the script is kept, the checkpoint lacks it",
        "inner.b: 'list' of the script is kept, the checkpoint lacks it",
    ]
    second.restore(new, state)
    assert new == {"n": 1, "best": float("inf"), "inner": {"a": 1, "b": [1]}}
    # What training removed is told to the next one, too.
    assert second.state(new) == {**new, "(removed)": [["inner", "gone"]]}


def test_a_field_that_is_new_in_a_dataclass_has_its_default() -> None:
    handler, progress = DataclassHandler(), Progress()
    state: Any = handler.state(progress)
    del state["counts"]
    assert handler.differences(progress, state) == []
    assert [found.key for found in handler.changed_settings(progress, state)] == ["counts"]
    handler.restore(progress, state)
    assert progress.counts == {}


class Scaler:
    """Has no state while it is disabled, as those of torch."""

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.scale = enabled, 1.0

    def is_enabled(self) -> bool:
        return self.enabled

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@pytest.mark.parametrize(("before", "now", "kind"), [(True, False, "unexpected"), (False, True, "missing")])
def test_an_object_that_was_switched_on_or_off_is_a_difference_and_allowed_stays_as_it_is(
    before: bool, now: bool, kind: str
) -> None:
    handler, scaler = StateDictHandler(), Scaler(now)
    state = handler.state(Scaler(before))
    assert [found.kind for found in handler.differences(scaler, state)] == [kind]
    handler.restore(scaler, state)
    assert scaler.scale == 1.0
    assert handler.differences(scaler, handler.state(Scaler(now))) == []


def test_an_object_that_refuses_a_state_is_named_with_what_it_said() -> None:
    class Window:
        def state_dict(self) -> dict[str, int]:
            return {"size": 2}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("size differs")

    with pytest.raises(
        StateMismatchError, match=r"Window: its load_state_dict\(\) .*ValueError: size differs"
    ):
        StateDictHandler().restore(Window(), {"size": 3})
    assert StateDictHandler().order < ContainerHandler().order
