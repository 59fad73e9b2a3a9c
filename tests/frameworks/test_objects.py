"""Objects of ordinary classes: all of their attributes are kept, or they are refused."""

from __future__ import annotations

import enum
import io
import logging
import math
import random
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unbroken import Run
from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.numpy import NumpyCodec
from unbroken.frameworks.torch.tensors import TorchCodec
from unbroken.state.python import ObjectHandler
from unbroken.state.tree import LeafCodec
from unbroken.testing.handler_contract import Change, HandlerContract, Make, Parts


class Meter:
    """Attributes of many kinds; some come and go."""

    def __init__(self) -> None:
        self.best, self.count = math.inf, 0
        self.history: list[float] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.average = torch.zeros(3)
        self.array = np.zeros(2)
        self.by_name: dict[str, Any] = {"inner": torch.zeros(1)}
        self.first: int | None = 0

    def add(self) -> None:
        self.count += 1
        self.best = 1 / self.count
        self.history.append(self.best)
        self.recent.append(self.count)
        self.average.mul_(0.5).add_(1)
        self.array += 1
        self.by_name["inner"].add_(1)
        if hasattr(self, "first"):
            del self.first
        setattr(self, f"at_{self.count}", self.count)


class Slotted:
    __slots__ = ("__private", "average", "count", "unset")

    def __init__(self) -> None:
        self.count = self.__private = 0
        self.average = torch.zeros(2)

    def add(self) -> None:
        self.count += 1
        self.__private += 2
        self.average.add_(1)


class SlottedBelow(Slotted):
    __slots__ = ("below",)

    def add(self) -> None:
        super().add()
        self.below = self.count


class Guarded:
    """Counts how often an attribute is set, which a restore must not."""

    def __init__(self) -> None:
        self.value = 0

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["sets"] = self.__dict__.get("sets", 0) + 1
        self.__dict__[name] = value

    def add(self) -> None:
        self.value += 1


class Namespace(SimpleNamespace):
    def add(self) -> None:
        self.n = getattr(self, "n", 0) + 1


KINDS: dict[str, Make] = {
    "attributes": Meter,
    "slots": Slotted,
    "slots of two classes": SlottedBelow,
    "own __setattr__": Guarded,
    "namespace": Namespace,
}


class TestObject(HandlerContract):
    @pytest.fixture
    def handler(self) -> ObjectHandler:
        return ObjectHandler([NumpyCodec(), TorchCodec()])

    @pytest.fixture(params=KINDS)
    def make(self, request: pytest.FixtureRequest) -> Make:
        return KINDS[request.param]

    @pytest.fixture
    def change(self) -> Change:
        return lambda value: value.add()

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        return [NumpyCodec(), TorchCodec()]

    @pytest.fixture
    def inner(self) -> Parts:
        names = ("history", "recent", "average", "array", "by_name")
        return lambda value: [getattr(value, name) for name in names if hasattr(value, name)]


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Frozen:
    n: int = 0


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        (1, 2),
        b"x",
        math,
        len,
        Meter,
        Meter().add,
        Color.RED,
        Frozen(),
        object(),
        io.StringIO(),
        threading.Lock(),
        ValueError("x"),
        random.Random(0),
        iter([1]),
        property(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_and_what_holds_more_than_its_attributes_are_no_such_objects(value: object) -> None:
    assert not ObjectHandler().accepts(value)


class Hooked:
    def __init__(self, held: object) -> None:
        self.count, self.held = 0, held


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (lambda: 0, "builtins:function"),
        (logging.getLogger("x"), "logging:Logger"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Meter(), "test_objects:Meter"),
        (random.Random(0), "random:Random"),
    ],
    ids=["function", "logger", "module", "object", "generator"],
)
def test_an_attribute_that_cannot_be_kept_is_refused_on_entering(
    tmp_path: Path, held: object, kind: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"^stopper/attributes/held: .*{kind}"):
        Run(tmp_path / "r", stopper=Hooked(held)).__enter__()
    assert not (tmp_path / "r").exists()


def test_an_object_of_another_class_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path, meter=Meter()) as run:
        run.step()
    with (
        pytest.raises(StateMismatchError, match="class Slotted, the checkpoint has class Meter"),
        Run(tmp_path, meter=Slotted()),
    ):
        pass


def test_an_object_goes_on_in_a_run_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    meter = Meter()
    with Run(tmp_path, meter=meter) as run:
        for _ in range(3):
            meter.add()
            run.step()
    again = Meter()
    held = again.average, again.history
    with Run(tmp_path, resume="must", meter=again):
        meter.add(), again.add()
        assert (again.count, again.history, again.recent) == (4, meter.history, meter.recent)
        assert torch.equal(held[0], meter.average)
        assert held[1] is again.history
        assert not hasattr(again, "first")
