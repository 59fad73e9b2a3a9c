"""Generators that user objects hold are found wherever plain data can hide them, and come back exactly."""

from __future__ import annotations

import ast
import functools
import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.generators import HeldGenerators

MODULE_RNG = np.random.default_rng(5)


class WithClassAttribute:
    rng = random.Random(1)


class WithSlots:
    __slots__ = ("__hidden", "rng")

    def __init__(self) -> None:
        self.rng = random.Random(2)
        self.__hidden = random.Random(3)


class Refuses:
    def __get__(self, *_: object) -> object:
        raise TypeError("this descriptor does not apply")


class WithASlotThatRefuses:
    """As arrays of JAX, which are written in C."""

    __slots__ = ("refused", "rng")

    def __init__(self) -> None:
        self.rng = random.Random(2)


setattr(WithASlotThatRefuses, "refused", Refuses())  # noqa: B010 - a slot cannot be given a value in the class


class ReadsModule:
    def __getitem__(self, index: int) -> float:
        return sum(MODULE_RNG.normal() for _ in range(1))


def draw_from_module() -> float:
    return float(MODULE_RNG.normal())


class CallsFunction:
    def __call__(self) -> float:
        return draw_from_module()


def enclosing(rng: random.Random) -> Callable[[], float]:
    return lambda: 2 * rng.random()


def object_array(item: object) -> np.ndarray[Any, Any]:
    array = np.empty(2, dtype=object)
    array[1] = item
    return array


def new(seed: int = 7) -> random.Random:
    return random.Random(seed)


PLACES: list[tuple[object, tuple[str, ...]]] = [
    (new(), ("it",)),
    (SimpleNamespace(rng=new()), ("it.rng",)),
    (SimpleNamespace(inner=SimpleNamespace(rng=new())), ("it.inner.rng",)),
    ([new(), {"a": new(), 3: (new(),)}], ("it[0]", "it[1]['a']", "it[1][3][0]")),
    ({object(): new()}, ("it[key 0]",)),
    (object_array(new()), ("it[1]",)),
    (functools.partial(print, new(), end=new()), ("it.args[0]", "it.keywords['end']")),
    (new().random, ("it.__self__",)),
    (enclosing(new()), ("it<rng>",)),
    (WithClassAttribute(), ("it.rng",)),
    (WithSlots(), ("it._WithSlots__hidden", "it.rng")),
    (WithASlotThatRefuses(), ("it.rng",)),
    (ReadsModule(), ("it.__getitem__:MODULE_RNG",)),
    (CallsFunction(), ("it.__call__:draw_from_module:MODULE_RNG",)),
]


@pytest.mark.parametrize(("holder", "paths"), PLACES, ids=[paths[-1] for _, paths in PLACES])
def test_a_generator_is_found_where_objects_hold_it(holder: object, paths: tuple[str, ...]) -> None:
    assert HeldGenerators({"it": holder}).paths == paths


def draw_integer(rng: Any) -> float:
    return int(rng.integers(9, dtype=np.int32))


def seeded(kind: Any) -> Callable[[], Any]:
    return lambda: np.random.Generator(kind(1))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random.Random": (new, lambda rng: rng.gauss(0, 1)),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda rng: float(torch.randn((), generator=rng))),
    "RandomState": (lambda: np.random.RandomState(1), lambda rng: rng.normal()),
    "BitGenerator": (lambda: np.random.PCG64(1), lambda rng: rng.random_raw()),
    **{
        name: (seeded(kind), draw_integer)
        for name, kind in (
            ("PCG64", np.random.PCG64),
            ("PCG64DXSM", np.random.PCG64DXSM),
            ("MT19937", np.random.MT19937),
            ("Philox", np.random.Philox),
            ("SFC64", np.random.SFC64),
        )
    },
}


@pytest.mark.parametrize("name", GENERATORS)
def test_each_kind_of_generator_draws_the_same_again_after_restoring(name: str) -> None:
    make, draw = GENERATORS[name]
    holder = SimpleNamespace(rng=make())
    held = HeldGenerators({"it": holder})
    draw(holder.rng)  # some keep half of what they made for the next draw
    states = ast.literal_eval(repr(held.capture()))
    first = [draw(holder.rng) for _ in range(9)]

    held.restore(states)

    assert [draw(holder.rng) for _ in range(9)] == first


def test_generators_that_everybody_shares_are_left_out() -> None:
    numpy_random: Any = np.random
    shared = [random.random, np.random.rand, numpy_random.get_bit_generator(), torch.default_generator]

    assert HeldGenerators({"it": shared}).paths == ()


def test_a_generator_that_was_replaced_is_looked_up_afresh() -> None:
    holder = SimpleNamespace(inner=SimpleNamespace(rng=new(1)))
    held = HeldGenerators({"it": holder})
    holder.inner = SimpleNamespace(rng=new(2))

    states = held.capture()

    assert states == HeldGenerators({"it": SimpleNamespace(inner=SimpleNamespace(rng=new(2)))}).capture()


def test_looking_for_a_generator_does_not_fill_in_a_missing_key() -> None:
    holder: defaultdict[str, random.Random] = defaultdict(new)
    holder["a"].random()
    held = HeldGenerators({"it": holder})
    del holder["a"]

    with pytest.raises(UnsupportedStateError, match=r"it\['a'\]"):
        held.capture()

    assert not holder


def test_a_generator_that_is_gone_is_an_error_that_names_its_place() -> None:
    holder = SimpleNamespace(rng=new())
    held = HeldGenerators({"dataset": holder})
    holder.rng = None

    with pytest.raises(UnsupportedStateError, match=r"dataset\.rng.*NoneType"):
        held.capture()


def test_generators_made_later_are_named_and_not_taken_over() -> None:
    holder = SimpleNamespace(rng=new(), late=None)
    held = HeldGenerators({"dataset": holder})
    holder.late = new()

    assert held.look_again() == ("dataset.late",)
    assert held.paths == ("dataset.rng",)


def test_a_generator_in_a_set_is_refused_because_sets_have_no_order() -> None:
    with pytest.raises(UnsupportedStateError, match="in a set"):
        HeldGenerators({"dataset": SimpleNamespace(rngs={new(1), new(2)})})


def test_a_generator_that_asks_the_operating_system_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match=r"dataset\.rng.*operating system"):
        HeldGenerators({"dataset": SimpleNamespace(rng=random.SystemRandom())})


def test_restoring_names_every_difference_and_changes_nothing() -> None:
    saved = HeldGenerators({"it": SimpleNamespace(a=new(1), b=new(2), c=np.random.default_rng(3))}).capture()
    holder = SimpleNamespace(a=new(9), c=np.random.Generator(np.random.Philox(3)), d=new(4))
    held = HeldGenerators({"it": holder})
    before = held.capture()

    with pytest.raises(StateMismatchError) as caught:
        held.restore(saved)

    assert "it.b has a saved state but is not here" in str(caught.value)
    assert "it.c: checkpoint has a numpy.Generator (PCG64), found a numpy.Generator (Philox)" in str(
        caught.value
    )
    assert "it.d has no saved state" in str(caught.value)
    assert held.capture() == before


def test_large_containers_are_taken_for_data() -> None:
    rows = [(f"{number}.png", number) for number in range(100_000)]

    assert HeldGenerators({"it": SimpleNamespace(rows=rows, rng=new())}).paths == ("it.rng",)


def test_objects_that_hold_each_other_are_walked_once() -> None:
    one, other = SimpleNamespace(rng=new()), SimpleNamespace()
    one.other, other.one = other, one

    assert HeldGenerators({"it": one}).paths == ("it.rng",)
