"""Objects of ordinary classes: all of their attributes are kept, or they are refused."""

from __future__ import annotations

import enum
import io
import logging
import math
import random
import threading
from collections import defaultdict, deque
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
    def make(self, request: pytest.FixtureRequest, handler: ObjectHandler) -> Make:
        def build() -> Any:
            value = KINDS[request.param]()
            # A run looks at its parts when it is entered.
            handler.state(value)
            return value

        return build

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
        (deque([random.Random(0)]), "random:Random"),
    ],
    ids=["function", "logger", "module", "object", "generator in a deque"],
)
def test_an_attribute_that_cannot_be_kept_is_refused_on_entering(
    tmp_path: Path, held: object, kind: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"^stopper/attributes/held.*: .*{kind}"):
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


def test_an_attribute_that_is_new_in_the_script_stays_and_is_told(tmp_path: Path) -> None:
    with Run(tmp_path, stopper=Namespace(best=1.0, patience=5)) as run:
        run.step()
    for _ in range(2):
        again = Namespace(best=9.0, patience=5, cooldown=3)
        with Run(tmp_path, resume="must", stopper=again) as run:
            assert vars(again) == {"best": 1.0, "patience": 5, "cooldown": 3}
            found = (
                [] if run.restored is None else [line for line in run.restored.changed if "stopper" in line]
            )
            expected = "stopper: cooldown: 3 of the script is kept, the checkpoint lacks it"
            assert found == ([expected] if run.step_count == 1 else [])
            run.step()


def test_an_attribute_that_training_has_removed_stays_so_over_two_resumes(tmp_path: Path) -> None:
    meter = Namespace(n=0, warming=True)
    with Run(tmp_path, meter=meter) as run:
        del meter.warming
        run.step()
    for _ in range(2):
        meter = Namespace(n=0, warming=True)
        with Run(tmp_path, resume="must", meter=meter) as run:
            assert vars(meter) == {"n": 0}
            assert run.restored is not None
            assert not run.restored.settings
            run.step()


def test_what_the_script_sets_between_entering_and_the_loop_is_as_in_the_checkpoint(tmp_path: Path) -> None:
    for expected in (None, {"n": 1}):
        counts = {"n": 0}
        with Run(tmp_path, counts=counts) as run:
            counts["phase"] = 1
            for _ in run.epochs(1 + (expected is not None)):
                if expected is not None:
                    assert counts == expected
                counts.pop("phase", None)
                counts["n"] = 1
                run.step()


@dataclass
class Settings:
    n: int = 0


def with_attributes(**attributes: Any) -> Settings:
    settings = Settings()
    vars(settings).update(attributes)
    return settings


@pytest.mark.parametrize(
    ("saved", "script", "expected"),
    [
        ({"n": 1}, {"n": 0, "new": torch.ones(2)}, ["new"]),
        ({"n": 1, "in": {"a": 1}}, {"n": 0, "in": {"a": 0, "b": {"c": 1}}}, ["in.b"]),
        ({"n": 1, "in": {1: 1}}, {"n": 0, "in": {1: 0, "b": 2}}, ["in.b"]),
        ({"n": 1, "in": defaultdict(int)}, {"n": 0, "in": defaultdict(int, b=2)}, ["in.b"]),
        ({"n": 1}, {"n": 0, "a/b": 2}, ["a/b"]),
        (Namespace(n=1, d={}), Namespace(n=0, d={"x": 1}), ["d.x"]),
        (with_attributes(n=1), with_attributes(beside=1), ["beside"]),
        (
            with_attributes(n=1, old=random.Random(1)),
            with_attributes(old=random.Random(2), beside=1),
            ["beside"],
        ),
    ],
    ids=["tensor", "inside", "other keys", "defaultdict", "slash", "object", "dataclass", "beside others"],
)
def test_what_is_new_in_the_script_is_kept_wherever_it_is(
    tmp_path: Path, saved: Any, script: Any, expected: list[str]
) -> None:
    with Run(tmp_path, part=saved) as run:
        run.step()
    with Run(tmp_path, resume="must", part=script) as run:
        assert run.restored is not None
        assert [found.setting.key for found in run.restored.settings] == expected
        assert (script["n"] if isinstance(script, dict) else script.n) == 1
        run.step()
    with Run(tmp_path, resume="must", part=script) as run:
        assert run.restored is not None
        assert not run.restored.settings
