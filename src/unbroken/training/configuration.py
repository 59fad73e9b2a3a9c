"""The configuration that a script hands in: any of the usual kinds, kept as plain data, and compared.

Plain data outlives the classes it came from, and its differences read well: `config.model.width: 8 -> 16`.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from unbroken.errors import UnbrokenError, UnsupportedStateError
from unbroken.state.readable import readable
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder, Json, LeafCodec

# Deeper than any configuration, and less than the encoder takes.
_DEEPEST = 50
_LONGEST_TEXT = 120
# So much of what is the same stays in sight before the first difference of two long values.
_SHOWN_BEFORE = 20


class _Absent(enum.Enum):
    ABSENT = "absent"

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent.ABSENT


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that was `then` in the checkpoint and is `now` in force, under its dotted name.

    Both are plain Python, or ABSENT where there is none of that name.
    """

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        then, now = _shortened(repr(self.then), repr(self.now))
        return f"{self.name}: {then} -> {now}"


def differences_of(then: Json, now: Json, where: str = "") -> list[ChangedValue]:
    """Return what differs between two encoded values, sorted by dotted name below `where`.

    Compared is what they say: a dataclass equals the dict of its fields, a tuple the list of its items.
    """
    return _compared(readable(then), readable(now), where)


def encode_plain(value: object, where: str, codecs: Sequence[LeafCodec]) -> Json:
    """Return `value` as tagged JSON, with what has fields as the plain dict of them.

    Raises UnsupportedStateError, naming the place below `where`, for what is no plain data.
    """
    return Encoder(TensorTable(), codecs).encode(_Plain(codecs).of(value, where), where)


class _Plain:
    """Takes containers and objects with fields apart; what has none is tried on the encoder."""

    def __init__(self, codecs: Sequence[LeafCodec]) -> None:
        self._codecs = codecs
        self._open: list[object] = []

    def of(self, value: Any, where: str) -> Any:
        with _asking(value, where):
            if _is_model(value):
                value = value.model_dump()
            fields = _fields(value)
        if fields is None and not _is_sequence(value) and not isinstance(value, AbstractSet):
            return self._leaf(value, where)
        self._check_open(value, where)
        self._open.append(value)
        found = self._items(value, where) if fields is None else self._named(fields, where)
        self._open.pop()
        return found

    def _named(self, fields: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        return {
            self._leaf(key, f"{where}, key {key!r:.60}"): self.of(item, _inner(where, key))
            for key, item in fields.items()
        }

    def _items(self, value: Any, where: str) -> Any:
        with _asking(value, where):
            elements = list(value)
        if isinstance(value, AbstractSet):
            kind = set if isinstance(value, set) else frozenset
            return kind(self._leaf(item, f"{where}, element {item!r:.60}") for item in elements)
        items = [self.of(item, f"{where}[{index}]") for index, item in enumerate(elements)]
        return tuple(items) if isinstance(value, tuple) else items

    def _leaf(self, value: Any, where: str) -> Any:
        plain = _without_subclass(value)
        table = TensorTable()
        try:
            Encoder(table, self._codecs).encode(plain, where)
        except UnsupportedStateError as error:
            raise _refused(value, where) from error
        if table.sources:
            raise _refused(value, where)
        return plain

    def _check_open(self, value: object, where: str) -> None:
        if any(outer is value for outer in self._open):
            raise UnsupportedStateError(
                f"{where}: cannot keep a {_kind(value)} that contains itself",
                hint="break the cycle, or leave it out",
            )
        if len(self._open) >= _DEEPEST:
            raise UnsupportedStateError(
                f"{where[:60]}...: cannot keep values nested {_DEEPEST} deep", hint="make it flatter"
            )


@contextmanager
def _asking(value: object, where: str) -> Iterator[None]:
    """Say where the value's own code fails: for an item that is missing, or cannot be worked out."""
    try:
        yield
    except UnbrokenError:
        raise
    except Exception as error:
        raise UnsupportedStateError(
            f"{where}: cannot read this {_kind(value)}: {type(error).__name__}: {error}",
            hint="set what is missing, or hand in what the script uses of it as a plain dict",
        ) from error


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return what an object with named fields consists of; None if it is none."""
    if isinstance(value, Mapping):
        # Also what only behaves like a dict. Items that are worked out when asked for are asked for.
        return {key: _item(value, key) for key in value}
    if isinstance(value, type | enum.Enum):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if hasattr(type(value), "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in type(value).__attrs_attrs__}
    return None


def _item(value: Mapping[Any, Any], key: object) -> Any:
    try:
        return value[key]
    except Exception as error:
        raise LookupError(f"its item {key!r:.60}: {error}") from error


def _is_model(value: object) -> bool:
    return callable(getattr(type(value), "model_dump", None))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range)


def _without_subclass(value: Any) -> Any:
    """Return a number or text of a class of its own as the plain one that it is."""
    for kind in (int, float, str):
        # A library's own scalars, which are of these kinds too, are kept with their exact type.
        if isinstance(value, kind) and not isinstance(value, bool | enum.Enum):
            is_ours = type(value) is kind or type(value).__module__.partition(".")[0] == "numpy"
            return value if is_ours else kind(value)
    return value


def _inner(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _kind(value: object) -> str:
    cls = value if isinstance(value, type) else type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"class {name}" if isinstance(value, type) else name


def _refused(value: object, where: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{where}: cannot keep a {_kind(value)} as plain data", hint=_hint(value))


def _hint(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        return "keep the numbers, by .tolist(); what changes in training is a part, by a keyword of Run"
    if hasattr(value, "state_dict"):
        return "leave it out: an object with state is a part, by a keyword of Run"
    if isinstance(value, bytes):
        return "keep a digest of it, or the path of the file that holds it"
    if isinstance(value, enum.Enum):
        return "define the class at the top of its module, or keep the value"
    if callable(value) or isinstance(value, types.ModuleType):
        return "keep its name as a string"
    if isinstance(value, PurePath) or hasattr(value, "fileno"):
        return "keep the path as a string"
    return "keep numbers, strings, lists and dicts, such as vars() of the object"


def _compared(then: Any, now: Any, where: str) -> list[ChangedValue]:
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            change
            for key in sorted({*then, *now})
            for change in _compared(then.get(key, ABSENT), now.get(key, ABSENT), _inner(where, key))
        ]
    if _has_structure(then) and _has_structure(now) and len(then) == len(now):
        return [
            change
            for index, (old, new) in enumerate(zip(then, now, strict=True))
            for change in _compared(old, new, f"{where}[{index}]")
        ]
    # By what Python prints: NaN is itself, and True is not 1.
    return [] if repr(then) == repr(now) else [ChangedValue(where, then, now)]


def _has_structure(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict | list) for item in value)


def _shortened(then: str, now: str) -> tuple[str, str]:
    """Return two long texts from shortly before their first difference on."""
    if max(len(then), len(now)) <= _LONGEST_TEXT:
        return then, now
    same = 0
    while same < min(len(then), len(now)) and then[same] == now[same]:
        same += 1
    start = max(0, same - _SHOWN_BEFORE)
    return _cut(then, start), _cut(now, start)


def _cut(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + _LONGEST_TEXT else ""
    return f"{before}{text[start : start + _LONGEST_TEXT]}{after}"
