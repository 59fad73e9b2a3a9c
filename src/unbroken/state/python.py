"""Handlers for plain Python objects: containers, dataclasses, anything with a state_dict or attributes."""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from unbroken.errors import UnsupportedStateError
from unbroken.state.handlers import ORDER_VALUE, Difference, StateHandler
from unbroken.state.tensors import TensorSource, copy_bytes
from unbroken.state.tree import Encoder, LeafCodec, TensorTable

# The key for attributes of a dataclass that are no fields.
_OTHERS = "(attributes)"


class ContainerHandler:
    """Dictionaries, lists, sets and deques, restored in place: tensors keep their identity where they fit."""

    name = "python.container"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = ()) -> None:
        self._codecs = tuple(codecs)

    def accepts(self, value: object) -> bool:
        return isinstance(value, MutableMapping | list | set | deque)

    def state(self, value: Any) -> object:
        lost = (
            vars(value) if isinstance(value, dict | list | set | deque) and hasattr(value, "__dict__") else {}
        )
        if lost:
            raise UnsupportedStateError(
                f"a {type(value).__qualname__} has attributes beside its items, which would not be kept: "
                f"{', '.join(lost)}",
                hint="give its class state_dict() and load_state_dict()",
            )
        if isinstance(value, deque):
            return deque(value, value.maxlen)
        return _plain_kind(value)(value)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        expected, found = _plain_kind(value).__name__, type(state).__name__
        if found == expected:
            return []
        return [Difference("other", "", f"expected a {expected}, the checkpoint holds a {found}")]

    def restore(self, value: Any, state: Any) -> None:
        _Filling(self._codecs).fill(value, state)


class DataclassHandler:
    """Instances of dataclasses that are not frozen; what their fields hold is restored in place too."""

    name = "python.dataclass"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = ()) -> None:
        self._codecs = tuple(codecs)

    def accepts(self, value: object) -> bool:
        return (
            dataclasses.is_dataclass(value)
            and not isinstance(value, type)
            and not type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        )

    def state(self, value: Any) -> object:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        others = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in fields}
        return {**fields, **({_OTHERS: others} if others else {})}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        expected = {field.name for field in dataclasses.fields(value)}
        found = set(state) - {_OTHERS} if isinstance(state, dict) else set()
        return [
            Difference("missing", name, "the checkpoint lacks this field")
            for name in sorted(expected - found)
        ] + [
            Difference("unexpected", name, "the class lacks this field") for name in sorted(found - expected)
        ]

    def restore(self, value: Any, state: Any) -> None:
        filling = _Filling(self._codecs)
        fields = {name: item for name, item in state.items() if name != _OTHERS}
        for name, item in {**fields, **state.get(_OTHERS, {})}.items():
            # The script may hold the list or tensor that stands there, as for a container.
            setattr(value, name, filling.fill(getattr(value, name, None), item))


class StateDictHandler:
    """Any object with `state_dict()` and `load_state_dict(state)`: loaders, meters, early stopping."""

    name = "python.state_dict"
    order = ORDER_VALUE

    def accepts(self, value: object) -> bool:
        return (
            not isinstance(value, type)
            and callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
        )

    def state(self, value: Any) -> object:
        return value.state_dict()

    def differences(self, value: Any, state: Any) -> list[Difference]:
        # What fits is known to the object alone: it judges in load_state_dict.
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state)


class ObjectHandler:
    """Instances of ordinary classes, which say nothing of their state: each attribute is kept, or refused."""

    name = "python.object"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = ()) -> None:
        self._codecs = tuple(codecs)

    def accepts(self, value: object) -> bool:
        # Those of a frozen dataclass and of an enumeration are not meant to change.
        if isinstance(value, type | enum.Enum) or dataclasses.is_dataclass(value):
            return False
        cls = type(value)
        return (hasattr(value, "__dict__") or bool(_slots(cls))) and not _has_hidden_state(cls)

    def state(self, value: Any) -> object:
        # Without its module: a script is `__main__` when it is run, and has a name when it is imported.
        return {"class": type(value).__qualname__, "attributes": dict(_attributes(value))}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        mine, theirs = type(value).__qualname__, state["class"]
        if mine != theirs:
            return [Difference("other", "", f"class {mine}, the checkpoint has class {theirs}")]
        unknown = () if hasattr(value, "__dict__") else state["attributes"].keys() - dict(_slots(type(value)))
        return [Difference("unexpected", name, "the class has no slot for it") for name in sorted(unknown)]

    def restore(self, value: Any, state: Any) -> None:
        filling, saved = _Filling(self._codecs), state["attributes"]
        live, slots = dict(_attributes(value)), dict(_slots(type(value)))
        # Past the class's own __setattr__ and __delattr__, which may check or count.
        for name in live.keys() - saved.keys():
            object.__delattr__(value, name)
        for name, item in saved.items():
            # The script may hold the list or tensor that stands there, as for a container.
            filled = filling.fill(live.get(name), item)
            if name in slots:
                slots[name].__set__(value, filled)
            elif hasattr(value, "__dict__"):
                vars(value)[name] = filled


def python_handlers(codecs: Iterable[LeafCodec] = ()) -> list[StateHandler]:
    """Return the handlers for plain Python objects, in the order in which they are asked."""
    codecs = tuple(codecs)
    return [StateDictHandler(), DataclassHandler(codecs), ContainerHandler(codecs), ObjectHandler(codecs)]


def _plain_kind(value: object) -> Any:
    """Return the plain container that holds what `value` does."""
    if isinstance(value, MutableMapping):
        return dict
    return next(kind for kind in (deque, set, list) if isinstance(value, kind))


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    for name, slot in _slots(type(value)):
        # One that nothing has been put into is not there.
        if hasattr(value, name):
            yield name, slot.__get__(value)
    yield from getattr(value, "__dict__", {}).items()


def _slots(cls: type) -> list[tuple[str, types.MemberDescriptorType]]:
    return [
        (name, item)
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, item in vars(base).items()
        if isinstance(item, types.MemberDescriptorType)
    ]


def _has_hidden_state(cls: type) -> bool:
    """Tell whether instances hold more than their attributes, as files, locks and numbers do."""
    fields = (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0) + len(_slots(cls))
    size = object.__basicsize__ + fields * struct.calcsize("P")
    return bool(cls.__itemsize__) or cls.__basicsize__ > size


class _Filling:
    """Puts loaded values into live containers and tensors in place, where they are of the same kind."""

    def __init__(self, codecs: Sequence[LeafCodec]) -> None:
        self._codecs = codecs
        self._filled: set[int] = set()

    def fill(self, live: Any, loaded: Any) -> Any:
        """Return what belongs in the place of `live`: itself, filled, or `loaded`."""
        if id(live) in self._filled:
            # One tensor in two places: it stays so only if both places hold the same.
            return live if self._is_equal(live, loaded) else loaded
        if any(codec.assign(live, loaded) for codec in self._codecs):
            self._filled.add(id(live))
            return live
        if isinstance(live, MutableMapping) and isinstance(loaded, dict):
            items = {key: self.fill(live.get(key), item) for key, item in loaded.items()}
            live.clear()
            live.update(items)
            return live
        if isinstance(live, list) and isinstance(loaded, list):
            room = len(loaded) - len(live)
            pairs = zip(live + [None] * room, loaded, strict=False)
            live[:] = [self.fill(old, new) for old, new in pairs]
            return live
        if isinstance(live, deque) and isinstance(loaded, deque) and live.maxlen == loaded.maxlen:
            live.clear()
            live.extend(loaded)
            return live
        if isinstance(live, set) and isinstance(loaded, set):
            live.clear()
            live.update(loaded)
            return live
        return loaded

    def _is_equal(self, live: Any, loaded: Any) -> bool:
        tables = TensorTable(), TensorTable()
        encoded = [
            Encoder(table, self._codecs).encode(value, "value")
            for table, value in zip(tables, (live, loaded), strict=True)
        ]
        sources = [table.sources.get("value") for table in tables]
        return encoded[0] == encoded[1] and _bytes_of(sources[0]) == _bytes_of(sources[1])


def _bytes_of(source: TensorSource | None) -> tuple[object, ...] | None:
    return None if source is None else (source.dtype, source.shape, copy_bytes(source))
