"""The handlers of arrays, generators and plain Python objects keep the promises of the contract."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.frameworks.generator_part import GeneratorHandler
from unbroken.frameworks.numpy import ArrayHandler, NumpyCodec
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.state.python import ContainerHandler, DataclassHandler, StateDictHandler
from unbroken.state.tree import LeafCodec
from unbroken.testing.handler_contract import Change, HandlerContract, Make, Parts
from unbroken.training.randomness import GlobalRandomness, GlobalRandomnessHandler


def codecs_of_a_run() -> list[LeafCodec]:
    """The codecs that a run has, without sharing memory: none of these handlers copies."""
    return [NumpyCodec(), TorchCodec()]


ARRAYS: dict[str, Make] = {
    "plain": lambda: np.zeros((2, 3)),
    "whole numbers": lambda: np.zeros(5, dtype=np.int16),
    "scalar": lambda: np.zeros(()),
    "turned": lambda: np.zeros((3, 2)).T,
    "view of a larger one": lambda: np.zeros((10, 10))[::3, 1:4],
}


class TestArray(HandlerContract):
    @pytest.fixture
    def handler(self) -> ArrayHandler:
        return ArrayHandler()

    @pytest.fixture(params=ARRAYS)
    def make(self, request: pytest.FixtureRequest) -> Make:
        return ARRAYS[request.param]

    @pytest.fixture
    def change(self) -> Change:
        return lambda array: np.add(array, 1, out=array)

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()

    def test_a_view_of_it_shows_what_was_restored(self, handler: ArrayHandler, make: Make) -> None:
        array = make()
        view = array.view()
        handler.restore(array, np.full_like(array, 7))
        assert (view == 7).all()


GENERATORS: dict[str, tuple[Make, Change]] = {
    "random.Random": (lambda: random.Random(1), lambda generator: generator.gauss(0, 1)),
    "numpy Generator": (
        lambda: np.random.default_rng(1),
        # 32 bits at a time: PCG64 keeps the other half for later.
        lambda generator: generator.integers(9, dtype=np.uint32),
    ),
    "numpy Generator of MT19937": (
        lambda: np.random.Generator(np.random.MT19937(1)),
        lambda generator: generator.normal(),
    ),
    "numpy RandomState": (lambda: np.random.RandomState(1), lambda generator: generator.normal()),
    "numpy BitGenerator": (lambda: np.random.Philox(1), lambda generator: generator.random_raw()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda generator: torch.randn((), generator=generator),
    ),
}


class TestGenerator(HandlerContract):
    @pytest.fixture(params=GENERATORS)
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def handler(self) -> GeneratorHandler:
        return GeneratorHandler()

    @pytest.fixture
    def make(self, kind: str) -> Make:
        return GENERATORS[kind][0]

    @pytest.fixture
    def change(self, kind: str) -> Change:
        return GENERATORS[kind][1]


def grow(value: Any) -> None:
    """Change tensors in place, put others in their place, and add what was not there."""
    value["average"].mul_(0.5).add_(1)
    value["array"] += 1
    value["n"] += 1
    value["inner"]["history"].append((value["n"], float(value["average"][0])))
    value["inner"]["list"][0].sub_(1)
    value["seen"].add(value["n"])
    value["replaced"] = torch.full((value["n"],), 0.5)
    value[value["n"]] = {"nan": float("nan"), "empty": np.zeros(0), "bytes": bytes([value["n"]]) * 100}


def contents() -> dict[Any, Any]:
    return {
        "average": torch.zeros(3),
        "array": np.zeros((2, 2), dtype=np.float32),
        "n": 0,
        "inner": {"history": [], "list": [torch.zeros(2)]},
        "seen": set(),
        "replaced": None,
    }


DICTIONARIES: dict[str, Make] = {
    "dict": contents,
    "OrderedDict": lambda: OrderedDict(contents()),
    "defaultdict": lambda: defaultdict(list, contents()),
}


class TestDictionary(HandlerContract):
    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler(codecs_of_a_run())

    @pytest.fixture(params=DICTIONARIES)
    def make(self, request: pytest.FixtureRequest) -> Make:
        return DICTIONARIES[request.param]

    @pytest.fixture
    def change(self) -> Change:
        return grow

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda value: [
            value["average"],
            value["array"],
            value["inner"],
            value["inner"]["history"],
            value["inner"]["list"],
            value["inner"]["list"][0],
            value["seen"],
        ]


class TestCounter(HandlerContract):
    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler()

    @pytest.fixture
    def make(self) -> Make:
        return Counter

    @pytest.fixture
    def change(self) -> Change:
        return lambda counter: counter.update(["a", counter.total()])


class TestList(HandlerContract):
    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler(codecs_of_a_run())

    @pytest.fixture
    def make(self) -> Make:
        return lambda: [torch.zeros(2), {"n": 0}, [1, 2]]

    @pytest.fixture
    def change(self) -> Change:
        def train(value: list[Any]) -> None:
            value[0].add_(1)
            value[1]["n"] += 1
            value[2].pop() if value[2] else value.append((1, "x"))

        return train

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()

    @pytest.fixture
    def inner(self) -> Parts:
        return lambda value: value[:3]


class TestSet(HandlerContract):
    @pytest.fixture
    def handler(self) -> ContainerHandler:
        return ContainerHandler()

    @pytest.fixture
    def make(self) -> Make:
        return lambda: {"a", (1, 2)}

    @pytest.fixture
    def change(self) -> Change:
        return lambda value: value.add(len(value))


@dataclass
class Progress:
    best: float = float("inf")
    history: list[tuple[int, float]] = field(default_factory=list)
    average: torch.Tensor = field(default_factory=lambda: torch.zeros(2))
    array: Any = field(default_factory=lambda: np.zeros(2))
    counts: dict[str, int] = field(default_factory=dict)

    def add(self) -> None:
        self.best = min(self.best, 1 / (len(self.history) + 1))
        self.history.append((len(self.history), self.best))
        self.average.add_(self.best)
        self.array += self.best
        self.counts["n"] = self.counts.get("n", 0) + 1


@dataclass(slots=True)
class Slotted:
    best: float = float("inf")
    history: list[float] = field(default_factory=list)
    average: torch.Tensor = field(default_factory=lambda: torch.zeros(2))

    def add(self) -> None:
        self.best = min(self.best, 1 / (len(self.history) + 1))
        self.history.append(self.best)
        self.average.add_(self.best)


class TestDataclass(HandlerContract):
    @pytest.fixture
    def handler(self) -> DataclassHandler:
        return DataclassHandler(codecs_of_a_run())

    @pytest.fixture(params=[Progress, Slotted])
    def make(self, request: pytest.FixtureRequest) -> Make:
        return request.param  # type: ignore[no-any-return]

    @pytest.fixture
    def change(self) -> Change:
        return lambda progress: progress.add()

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()

    @pytest.fixture
    def inner(self) -> Parts:
        names = ("history", "average", "array", "counts")
        return lambda progress: [getattr(progress, name) for name in names if hasattr(progress, name)]


class Meter:
    """Keeps what it is given, as many a load_state_dict does."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2)
        self.array = np.zeros(2)
        self.window: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def add(self) -> None:
        self.window.append(len(self.window) / 3)
        self.mean.add_(self.window[-1]).mul_(0.9).add_(1)
        self.array += self.mean.numpy()


class TestObjectWithStateDict(HandlerContract):
    @pytest.fixture
    def handler(self) -> StateDictHandler:
        return StateDictHandler()

    @pytest.fixture
    def make(self) -> Make:
        return Meter

    @pytest.fixture
    def change(self) -> Change:
        return lambda meter: meter.add()

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return codecs_of_a_run()


class TestProcessRandomness(HandlerContract):
    @pytest.fixture(autouse=True)
    def _generators_as_they_were(self) -> Iterator[None]:
        state = capture_global_rng()
        yield
        restore_present_rng(state)

    @pytest.fixture
    def handler(self) -> GlobalRandomnessHandler:
        return GlobalRandomnessHandler()

    @pytest.fixture
    def make(self) -> Make:
        def begin() -> GlobalRandomness:
            # A fresh process, as far as its generators go.
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            return GlobalRandomness()

        return begin

    @pytest.fixture
    def change(self) -> Change:
        return lambda _: (random.gauss(0, 1), np.random.normal(), torch.randn(3))
