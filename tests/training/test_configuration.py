"""What `config=` takes, what is kept of it, and how a change of it is told."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import re
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UnsupportedStateError
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder
from unbroken.training.arguments import plain
from unbroken.training.configuration import differences_of


class Mode(enum.Enum):
    FAST = "fast"


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Layer:
    width: int = 8
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str = "digits"
    layers: tuple[Layer, ...] = (Layer(), Layer(16))
    betas: tuple[float, float] = (0.9, 0.999)
    extra: Any = None


class Resolving(MutableMapping[str, Any]):
    """A mapping as configuration libraries have them: no dict, and values are worked out on access."""

    def __init__(self, **items: Any) -> None:
        self._hidden = items

    def __getitem__(self, key: str) -> Any:
        value = self._hidden[key]
        return self[value[2:-1]] if isinstance(value, str) and value.startswith("${") else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._hidden[key] = value

    def __delitem__(self, key: str) -> None:
        del self._hidden[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hidden)

    def __len__(self) -> int:
        return len(self._hidden)


class Listed(MutableSequence[Any]):
    """A sequence of the same kind."""

    def __init__(self, *items: Any) -> None:
        self._hidden = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._hidden[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._hidden[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._hidden[index]

    def __len__(self) -> int:
        return len(self._hidden)

    def insert(self, index: int, value: Any) -> None:
        self._hidden.insert(index, value)


class Model:
    """An object that gives its fields by `model_dump`."""

    def model_dump(self) -> dict[str, Any]:
        return {"width": 8, "inner": {"rate": 0.1}}


class Attributes:
    """An object with fields, as the attrs library declares them."""

    __attrs_attrs__ = (types.SimpleNamespace(name="width"),)

    def __init__(self) -> None:
        self.width = 8


class Text(str):
    """A string of a class of its own."""

    __slots__ = ()


def told(then: object, now: object) -> list[str]:
    return [str(change) for change in differences_of(plain(then, "then"), plain(now, "now"), "config")]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (None, None),
        ({"rate": 0.1, "deep": {"on": True}}, {"rate": 0.1, "deep": {"on": True}}),
        (Layer(4), {"width": 4, "bias": True}),
        (argparse.Namespace(rate=0.1, files=["a"]), {"rate": 0.1, "files": ["a"]}),
        (types.SimpleNamespace(inner=Layer()), {"inner": {"width": 8, "bias": True}}),
        (Resolving(a="${b}", b=3, items=Listed(1, Resolving(x=2))), {"a": 3, "b": 3, "items": [1, {"x": 2}]}),
        (types.MappingProxyType({"a": UserDict(b=UserList([1]))}), {"a": {"b": [1]}}),
        (OrderedDict(a=Counter("x"), b=defaultdict(list, c=deque([1]))), {"a": {"x": 1}, "b": {"c": [1]}}),
        (Model(), {"width": 8, "inner": {"rate": 0.1}}),
        ([Attributes()], [{"width": 8}]),
        ({"size": namedtuple("Size", "h w")(2, 3)}, {"size": {"h": 2, "w": 3}}),
        ({"name": Text("a")}, {"name": "a"}),
    ],
)
def test_every_usual_kind_of_configuration_is_kept_as_plain_data(config: object, kept: object) -> None:
    assert plain(config, "config") == kept


def test_values_that_json_lacks_are_kept_exactly() -> None:
    config = {
        "path": Path("a/b"),
        "mode": Mode.FAST,
        "colour": Colour.RED,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scalar": np.float32(0.1),
        "never": math.inf,
        "betas": (0.9, 0.999),
        "seen": {1, 2},
        3: "an integer as key",
    }
    encoded = plain(config, "config")
    assert encoded == Encoder(TensorTable(), _codecs()).encode(config, "config")
    json.dumps(encoded, allow_nan=False)


def _codecs() -> list[Any]:
    from unbroken.training import families

    return families.codecs()


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {"inner": {}}
    found["inner"]["outer"] = [found]
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


class Bottomless(Mapping[str, Any]):
    """Gives another one of itself for ever."""

    def __getitem__(self, key: str) -> Any:
        return Bottomless()

    def __iter__(self) -> Iterator[str]:
        return iter(["more"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        ({"model": {"hooks": [1, print]}}, r"config\.model\.hooks\[1\]: .*builtin_function", "its name"),
        (Settings(extra=nn.Linear(1, 1)), r"config\.extra: .*nn\.modules\.linear\.Linear", "is a part"),
        ({"start": torch.ones(2)}, r"config\.start: cannot keep a torch\.Tensor", r"by \.tolist\(\)"),
        ({"weights": np.ones(2)}, r"config\.weights: cannot keep a numpy\.ndarray", r"by \.tolist\(\)"),
        ({"library": math}, r"config\.library: cannot keep a module", "its name"),
        ({"kind": Layer}, r"config\.kind: cannot keep a class .*Layer", "its name"),
        ({"digest": b"x" * 1000}, r"config\.digest: cannot keep a bytes", "the path of the file"),
        ({"seen": {print}}, r"config\.seen, element <built-in function print>: cannot keep", "its name"),
        ({print: 1}, r"config, key <built-in function print>: cannot keep", "its name"),
        (types.SimpleNamespace(thing=object()), r"config\.thing: cannot keep a object", r"vars\(\)"),
        (cyclic(), r"config\.inner\.outer\[0\]: cannot keep a dict that contains itself", "break the cycle"),
        (deep(), r"config\[0\]\[0\].*nested 50 deep", "flatter"),
        (Bottomless(), r"config\.more\.more.*nested 50 deep", "flatter"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_its_dotted_name(
    tmp_path: Path, config: object, message: str, hint: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{message}") as caught:
        unbroken.Run(tmp_path / "r", config=config)
    assert re.search(hint, caught.value.hint)
    assert not (tmp_path / "r").exists()


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, pytest.raises(UnsupportedStateError) as caught:
        plain({"log": file}, "config")
    assert (caught.value.message, caught.value.hint) == (
        "config.log: cannot keep a _io.TextIOWrapper as plain data",
        "keep the path as a string",
    )


def test_changes_are_told_by_dotted_name_and_both_values() -> None:
    then = {"lr": 0.1, "model": {"width": 8, "layers": [{"n": 1}, {"n": 2}]}, "gone": None, "betas": [1, 2]}
    now = {"lr": 0.2, "model": {"width": 8, "layers": [{"n": 1}, {"n": 3}]}, "new": "x", "betas": [1, 3]}
    assert told(then, now) == [
        "config.betas: [1, 2] -> [1, 3]",
        "config.gone: None -> absent",
        "config.lr: 0.1 -> 0.2",
        "config.model.layers[1].n: 2 -> 3",
        "config.new: absent -> 'x'",
    ]
    assert told(None, {"a": 1}) == ["config: None -> {'a': 1}"]


def test_a_value_that_only_compares_equal_is_a_change() -> None:
    assert told({"a": 1, "b": 0.0, "c": 1}, {"a": True, "b": -0.0, "c": 1.0}) == [
        "config.a: 1 -> True",
        "config.b: 0.0 -> -0.0",
        "config.c: 1 -> 1.0",
    ]


def test_values_of_libraries_are_told_as_what_they_stand_for() -> None:
    then = {"dtype": torch.float32, "device": torch.device("cpu"), "n": np.int64(3), "x": np.float32(0.5)}
    now = {"dtype": torch.bfloat16, "device": torch.device("meta"), "n": np.int64(4), "x": np.float64(0.5)}
    assert told(then, now) == [
        "config.device: 'cpu' -> 'meta'",
        "config.dtype: 'torch.float32' -> 'torch.bfloat16'",
        "config.n: 3 -> 4",
    ]


def test_the_same_configuration_in_another_kind_is_no_change() -> None:
    as_dict = {
        "name": "digits",
        "layers": [{"width": 8, "bias": True}, {"width": 16, "bias": True}],
        "betas": [0.9, 0.999],
        "extra": math.nan,
    }
    assert told(as_dict, Settings(extra=math.nan)) == []
    assert told(Resolving(**as_dict), argparse.Namespace(**as_dict)) == []
    assert told({"mode": Mode.FAST, "path": Path("a")}, {"mode": "fast", "path": "a"}) == []


def test_a_dataclass_kept_with_its_class_is_compared_by_its_fields() -> None:
    with_class = Encoder(TensorTable()).encode(Settings(), "config")
    assert "$dataclass" in with_class  # type: ignore[operator]
    renamed = json.loads(json.dumps(with_class).replace("Settings", "Vanished"))
    assert differences_of(renamed, plain(Settings(), "config"), "config") == []
    changes = differences_of(renamed, plain(Settings(name="letters"), "config"), "config")
    assert [str(change) for change in changes] == ["config.name: 'digits' -> 'letters'"]


def test_long_values_are_told_from_where_they_differ() -> None:
    (line,) = told({"prompt": "a" * 5000 + "old"}, {"prompt": "a" * 5000 + "new"})
    assert line == "config.prompt: ...aaaaaaaaaaaaaaaaaaaaold' -> ...aaaaaaaaaaaaaaaaaaaanew'"
    (line,) = told({"steps": list(range(1000))}, {"steps": [*range(999), -1]})
    assert line == "config.steps: ...995, 996, 997, 998, 999] -> ...995, 996, 997, 998, -1]"


def test_a_run_keeps_the_fields_and_tells_what_changed(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, config=Settings()) as run:
        run.step()
    assert CheckpointStore(tmp_path).latest().manifest.config == {
        "name": "digits",
        "layers": {"$tuple": [{"width": 8, "bias": True}, {"width": 16, "bias": True}]},
        "betas": {"$tuple": [0.9, 0.999]},
        "extra": None,
    }
    changed = argparse.Namespace(**{**dataclasses.asdict(Settings()), "betas": [0.8, 0.999]})
    with unbroken.Run(tmp_path, config=changed) as run:
        assert run.restored is not None
        assert [line for line in run.restored.changed if line.startswith("config")] == [
            "config.betas: [0.9, 0.999] -> [0.8, 0.999]"
        ]


class Lazy(Mapping[str, Any]):
    """Works an item out when it is asked for, which may fail."""

    def __getitem__(self, key: str) -> Any:
        if key == "root":
            raise RuntimeError("mandatory value missing")
        return {"width": 8}

    def __iter__(self) -> Iterator[str]:
        return iter(("model", "root"))

    def __len__(self) -> int:
        return 2


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        raise ValueError("not valid yet")


class Lines(Sequence[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("cannot be read")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data": Lazy()}, r"^config\.data: cannot read this .*Lazy: .*'root': mandatory value missing"),
        (Dumped(), "^config: cannot read this .*Dumped: ValueError: not valid yet"),
        (
            {"lines": [Lines()]},
            r"^config\.lines\[0\]: cannot read this .*Lines: RuntimeError: cannot be read",
        ),
    ],
    ids=["mapping", "model", "sequence"],
)
def test_what_fails_when_it_is_read_is_refused_by_its_dotted_name(
    tmp_path: Path, config: object, message: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=message) as caught:
        unbroken.Run(tmp_path / "r", config=config)
    assert caught.value.hint
