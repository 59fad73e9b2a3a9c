"""What a walk finds beside the parts of a run, by which names, and how it is put back."""

from __future__ import annotations

import functools
import random
import secrets
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.frameworks.discovery import Found, discover, script_roots
from unbroken.frameworks.places import GoneError, Roots


class Augment:
    calls = 0

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.names = ["a", "b"]

    def draw(self) -> float:
        return float(self.rng.random())


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)


def closure() -> Any:
    rng = random.Random(1)
    return lambda: rng.random() + 1


def suspended() -> Iterator[float]:
    rng, drawn = random.Random(1), 0
    while True:
        drawn += 1
        yield rng.random()


def found_in(known: tuple[object, ...] = (), **variables: Any) -> dict[str, Found]:
    roots = Roots({"script": variables}, {})
    return {found.name: found for found in discover(roots, {id(item) for item in known}).found}


def test_generators_are_found_wherever_objects_hold_them() -> None:
    running = suspended()
    next(running)
    found = found_in(
        plain=np.random.default_rng(1),
        augment=Augment(),
        slotted=Slotted(),
        closed=closure(),
        running=running,
        partial=functools.partial(print, random.Random(1)),
        method=Augment().draw,
        bound=np.random.default_rng(1).normal,
        nested={"a": [(torch.Generator(),)]},
        array=np.array([random.Random(1), None], dtype=object),
        loader=torch.utils.data.DataLoader([1, 2], generator=torch.Generator()),
    )

    assert {name for name, item in found.items() if item.kind == "generator"} == {
        "script.plain",
        "script.augment.rng",
        "script.slotted.rng",
        "script.closed<rng>",
        "script.running().rng",
        "script.partial.args[0]",
        "script.method.__self__.rng",
        "script.bound.__self__",
        "script.nested['a'][0][0]",
        "script.array[0]",
        "script.loader.generator",
    }


def test_shared_generators_and_those_without_a_state_are_left_out() -> None:
    found = found_in(
        legacy=np.random.rand,
        default=torch.default_generator,
        system=secrets.SystemRandom(),
        shared=random._inst,
    )

    assert not found


def test_objects_with_a_state_dict_and_plain_variables_are_found() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    found = found_in(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        scaler=torch.amp.GradScaler("cpu"),
        patience=3,
        best=None,
        average={"w": torch.zeros(2)},
        window=deque([1, 2], maxlen=3),
        augment=Augment(),
        kind=Augment,
        mixed=[1, Slotted()],
        module=types,
        function=print,
    )

    assert {name for name, item in found.items() if item.kind == "stateful"} == {
        "script.model",
        "script.optimizer",
        "script.scheduler",
        "script.scaler",
    }
    assert {name for name, item in found.items() if item.kind == "plain"} == {
        "script.patience",
        "script.best",
        "script.average",
        "script.window",
        "script.augment.names",
        "script.kind.calls",
        "script.mixed[0]",
    }


def test_what_is_known_is_left_out_with_all_that_it_holds() -> None:
    augment = Augment()

    assert set(found_in((augment,), augment=augment, other=1)) == {"script.other"}


def test_data_is_not_looked_into_and_that_is_said() -> None:
    roots = Roots({"script": {"data": list(range(20_000))}}, {})
    discovery = discover(roots, set())

    assert discovery.found == ()
    assert discovery.notes == ("not looked into: script.data, which has 20000 items",)


def test_values_are_put_where_they_were_found() -> None:
    augment, running = Augment(), suspended()
    next(running)
    variables = {"augment": augment, "nested": [1, augment], "running": running, "count": 1, "kind": Augment}
    roots = Roots({"script": variables}, {})
    places = {found.name: found.place for found in discover(roots, set()).found}

    places["script.count"].put(roots, 5)
    places["script.augment.names"].put(roots, ["c"])
    places["script.nested[0]"].put(roots, 7)
    places["script.running().drawn"].put(roots, 41)
    next(running)

    assert variables["count"] == 5
    assert augment.names == ["c"]
    assert variables["nested"][0] == 7
    assert places["script.running().drawn"].look(roots) == 42


def test_local_variables_of_running_functions_are_found_and_put() -> None:
    patience = 3

    def find() -> None:
        roots = script_roots({})
        name, place = next(
            (found.name, found.place)
            for found in discover(roots, set()).found
            if found.name.endswith(".patience")
        )
        assert name == "test_local_variables_of_running_functions_are_found_and_put.patience"
        place.put(roots, 8)

    find()
    assert patience == 8


def test_what_is_gone_or_cannot_be_changed_is_an_error() -> None:
    variables: dict[str, Any] = {"pair": (1, Slotted())}
    roots = Roots({"script": variables}, {})
    place = next(found.place for found in discover(roots, set()).found if found.kind == "plain")

    with pytest.raises(GoneError, match="a tuple cannot be changed in place"):
        place.put(roots, 2)
    with pytest.raises(GoneError, match="not there any more"):
        place.look(Roots({"script": {}}, {}))
    with pytest.raises(GoneError, match="the function script is not running"):
        place.look(Roots({}, {}))
