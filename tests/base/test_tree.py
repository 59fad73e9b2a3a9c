from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import DamagedError, StateMismatchError, UnsupportedStateError
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, TensorSource
from unbroken.state.tree import Decoder, Encoder


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Pair:
    left: int
    right: Any


class Mode(enum.Flag):
    FAST = 1
    SAFE = 2


Point = namedtuple("Point", "x y")


def round_trip(value: object) -> Any:
    table = TensorTable()
    encoded = Encoder(table).encode(value, "part")
    through_json = json.loads(json.dumps(encoded, allow_nan=False))
    tensors = {path: as_host(source) for path, source in table.sources.items()}
    return Decoder(tensors.__getitem__).decode(through_json)


def as_host(source: Any) -> HostTensor:
    data = bytearray(len(source.data))
    source.copy_to(memoryview(data))
    return HostTensor(source.dtype, source.shape, memoryview(data))


def same(one: Any, other: Any) -> bool:
    """Equality that also sees types, the sign of zero, NaN, and the order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one.hex() == other.hex()
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=200)
    | st.complex_numbers(allow_nan=True)
)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=25,
)


@given(values)
def test_any_plain_value_survives_the_round_trip_with_its_type(value: object) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": 1},
        {"": {"/": 1, "%2F": 2}},
        {1: "int", "1": "text"},
        {1: b"x" * 100, "1": b"y" * 100},
        [math.nan, math.inf, -math.inf, -0.0, 5e-324],
        2**53,
        2**53 + 1,
        -(2**200),
        bytearray(b"mutable"),
        b"inline",
        b"x" * 65,
        range(1, 10, 3),
        Counter({3: 1, "x": 7}),
        defaultdict(list, {"a": [1]}),
        Mode.FAST | Mode.SAFE,
        deque([1, (2,)], maxlen=5),
        Colour.RED,
        pathlib.Path("/a/b"),
        Point(1, (2, 3)),
        Pair(1, [2, {"k": (3,)}]),
    ],
    ids=repr,
)
def test_values_that_json_has_no_word_for_survive(value: object) -> None:
    found = round_trip(value)
    assert found == value or same(found, value)
    assert type(found) is type(value)


def test_plain_json_stays_plain_so_that_people_can_read_it() -> None:
    value = {"lr": 0.1, "name": "x", "list": [1, 2, None, True]}
    assert Encoder(TensorTable()).encode(value, "p") == value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, lambda: None]}, "part/a/1"),
        ({"a/b": object()}, "part/a%2Fb"),
        ([open], "part/0"),
        (type("Text", (str,), {})("x"), "part"),
        ([pathlib.PureWindowsPath("x")], "part/0"),
        ({"argument": "\udcff"}, "part/argument"),
        ([defaultdict(lambda: 3)], "part/0"),
        (dataclasses.make_dataclass("Local", ["x"])(1), "part"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_its_place_named(value: object, where: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{where}: cannot keep"):
        Encoder(TensorTable()).encode(value, "part")


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        Encoder(TensorTable()).encode(loop, "part")


def test_containers_nested_too_deep_are_refused_before_recursion_ends_in_a_crash() -> None:
    deep: list[object] = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="nested 100 deep"):
        Encoder(TensorTable()).encode(deep, "part")


def test_a_container_that_stands_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize("name", ["os:_Environ", "no.such.module:Thing", "tests.base.test_tree:absent"])
def test_a_class_that_the_program_has_not_loaded_is_never_imported_or_made_up(name: str) -> None:
    with pytest.raises((StateMismatchError, DamagedError)):
        Decoder({}.__getitem__).decode({"$dataclass": [name, {}]})


@pytest.mark.parametrize(
    "encoded",
    [
        {"$int": "x"},
        {"$bytes": "*"},
        {"$dict": [[1]]},
        {"$tuple": 5},
        {"$enum": ["os:name", "x"]},
        {"$complex": ["x"]},
        {"$range": []},
    ],
    ids=str,
)
def test_a_damaged_tag_is_reported_as_damage(encoded: Any) -> None:
    with pytest.raises((DamagedError, StateMismatchError)):
        Decoder({}.__getitem__).decode(encoded)


def test_tensors_with_the_same_memory_are_kept_once_under_all_their_paths() -> None:
    class Shared(TensorSource):
        dtype, shape, identity = "U8", (2,), ("memory", 1)

        def copy_to(self, target: memoryview) -> None:
            target[:] = b"ab"

    table = TensorTable()
    encoded = Encoder(table, keep_aliases=True).encode({"embed": Shared(), "head": Shared()}, "model")
    assert list(table.sources) == ["model/embed"]
    assert table.aliases == {"model/embed": ["model/head"]}
    assert encoded["head"]["$tensor"] == "model/embed"
    table = TensorTable()
    Encoder(table).encode({"best": Shared(), "last": Shared()}, "values")
    assert list(table.sources) == ["values/best", "values/last"], "a coincidence ties nothing"


class View(TensorSource):
    """What stands at `address`, seen as `identity` says; None for a view of no elements."""

    def __init__(self, address: int | None, identity: object) -> None:
        self.dtype, self.shape = "U8", (2,)
        self._address, self._identity = address, identity

    @property
    def address(self) -> int | None:
        return self._address

    @property
    def identity(self) -> Any:
        return self._identity

    def copy_to(self, target: memoryview) -> None:
        target[:] = b"ab"


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=str)
def test_only_what_is_the_same_memory_seen_the_same_way_is_tied(order: tuple[int, ...]) -> None:
    views = {
        "row": View(8, "row"),
        "same row": View(8, "row"),
        "column": View(8, "column"),
        "column behind": View(None, "column"),
        "empty": View(8, None),
    }
    names = [list(views)[index] for index in order]
    table = TensorTable()
    Encoder(table, keep_aliases=True).encode({name: views[name] for name in names}, "model")
    tied = {frozenset((path, *others)) for path, others in table.aliases.items()}
    rows = frozenset({"model/row", "model/same row"})
    assert rows in tied
    assert tied <= {rows, frozenset({"model/column", "model/column behind"})}
    assert "model/empty" in table.sources


@pytest.mark.parametrize(
    "value",
    [
        ["a", "\ud800"],
        {"a": 1, "b\udc00": 2},
        {"a": {1: "x", "y\ud800": 2}},
    ],
    ids=["in a list of texts", "in a key", "in one key of several kinds"],
)
def test_one_text_among_many_that_is_no_unicode_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedStateError, match="part"):
        Encoder(TensorTable()).encode(value, "part")


@pytest.mark.parametrize(
    "value",
    [
        list(range(2000)),
        [1, True, 2],
        [0, 2**53, -(2**53), 2**53 + 1],
        [-(2**53) - 1],
        ["a", "$b", "c/d", ""],
        ["a", None],
        {"a/b": 1, "a%2Fb": 2, "": 3},
        {"a": 1, "b$": 2},
        {"a": 1, "$b": 2},
    ],
    ids=str,
)
def test_many_values_of_one_kind_come_back_equal(value: object) -> None:
    assert same(round_trip(value), value)
