"""Handlers for plain Python objects: containers, dataclasses, anything with a state_dict or attributes."""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from unbroken.errors import StateMismatchError, UnbrokenError, UnsupportedStateError
from unbroken.state.filling import (
    Filling,
    IsElsewhere,
    Marking,
    Misfits,
    Place,
    ScriptKeys,
    new_in_script,
    nowhere,
)
from unbroken.state.handlers import ORDER_MODULE, ORDER_VALUE, Difference, Setting, StateHandler
from unbroken.state.tree import LeafCodec

# Keys for attributes of a dataclass that are no fields, and for what training has removed.
_OTHERS, _REMOVED = "(attributes)", "(removed)"


class ContainerHandler:
    """Dictionaries, lists, sets and deques, restored in place: tensors keep their identity where they fit."""

    name = "python.container"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = (), is_elsewhere: IsElsewhere = nowhere) -> None:
        self._codecs = tuple(codecs)
        self._is_elsewhere = is_elsewhere
        self._keys = ScriptKeys()

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
        content = _plain_kind(value)(value)
        if isinstance(value, dict | list):
            content = Marking(self._is_elsewhere).of(content)
        return self._with_removed(value, content) if isinstance(content, dict) else content

    def differences(self, value: Any, state: Any) -> list[Difference]:
        expected, found = _plain_kind(value).__name__, type(state).__name__
        if found == expected:
            loaded = _split(state)[0] if isinstance(state, dict) else state
            return [*Misfits(self._codecs).of(value, loaded)]
        return [Difference("other", "", f"expected a {expected}, the checkpoint holds a {found}")]

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        if not isinstance(value, MutableMapping):
            return []
        loaded, removed = _split(state)
        kept = self._keys.kept(value, value, removed)
        return [*new_in_script(dict(value), loaded, kept, self._is_elsewhere)]

    def restore(self, value: Any, state: Any) -> None:
        if not isinstance(value, MutableMapping):
            Filling(self._codecs).fill(value, state)
            return
        loaded, removed = _split(state)
        Filling(self._codecs, self._keys.kept(value, value, removed)).fill(value, loaded, ())
        self._keys.note_removed(value, value, removed)

    def _with_removed(self, value: MutableMapping[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
        if _REMOVED in value:
            raise UnsupportedStateError(
                f"the key {_REMOVED!r} stands for what training has removed", hint="call it otherwise"
            )
        removed = self._keys.removed(value, value)
        return {**content, **({_REMOVED: removed} if removed else {})}


class DataclassHandler:
    """Instances of dataclasses that are not frozen; what their fields hold is restored in place too."""

    name = "python.dataclass"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = (), is_elsewhere: IsElsewhere = nowhere) -> None:
        self._codecs = tuple(codecs)
        self._is_elsewhere = is_elsewhere
        self._keys = ScriptKeys()

    def accepts(self, value: object) -> bool:
        return (
            dataclasses.is_dataclass(value)
            and not isinstance(value, type)
            and not type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        )

    def state(self, value: Any) -> object:
        mark = Marking(self._is_elsewhere).of
        fields, others = _fields(value)
        removed = self._keys.removed(value, fields | others)
        return {
            **mark(fields),
            **({_OTHERS: mark(others)} if others else {}),
            **({_REMOVED: removed} if removed else {}),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        expected = {field.name for field in dataclasses.fields(value)}
        found = set(state) - {_OTHERS, _REMOVED} if isinstance(state, dict) else set()
        unknown = [
            Difference("unexpected", name, "the class lacks this field") for name in sorted(found - expected)
        ]
        return unknown or [*Misfits(self._codecs).of(_merged(value), self._loaded(value, state)[0])]

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        (fields, others), (loaded, kept) = _fields(value), self._loaded(value, state)
        saved_others = state.get(_OTHERS, {})
        saved_fields = {name: item for name, item in loaded.items() if name not in saved_others}
        found = [*new_in_script(fields, saved_fields, kept, self._is_elsewhere)]
        beside = [*new_in_script(others, saved_others, kept, self._is_elsewhere, _OTHERS)]
        if _OTHERS not in state:
            beside = [dataclasses.replace(setting, places=(_OTHERS,)) for setting in beside]
        return found + beside

    def restore(self, value: Any, state: Any) -> None:
        live, (loaded, kept) = _merged(value), self._loaded(value, state)
        # The script may hold the list or tensor that stands there, as for a container.
        items = Filling(self._codecs, kept).items(live, loaded, ())
        for name in live.keys() - items.keys():
            object.__delattr__(value, name)
        for name, item in items.items():
            setattr(value, name, item)
        self._keys.note_removed(value, live, state.get(_REMOVED, ()))

    def _loaded(self, value: Any, state: Any) -> tuple[dict[str, Any], set[Place]]:
        """Return what the checkpoint has for fields and attributes, and what stays where it has nothing."""
        loaded, removed = _split(state)
        others = loaded.pop(_OTHERS, {})
        return {**loaded, **others}, self._keys.kept(value, _merged(value), removed)


class StateDictHandler:
    """Any object with `state_dict()` and `load_state_dict(state)`: loaders, meters, early stopping."""

    name = "python.state_dict"
    # They may refuse a state, which is better found before others have theirs.
    order = ORDER_MODULE - 1

    def accepts(self, value: object) -> bool:
        return (
            not isinstance(value, type)
            and callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
        )

    def state(self, value: Any) -> object:
        return value.state_dict()

    def differences(self, value: Any, state: Any) -> list[Difference]:
        # What fits is known to the object alone, but for those that have no state while they are disabled.
        if not _is_switched(value, state):
            return []
        if state:
            return [Difference("unexpected", "", "it is disabled here, and was not in the checkpoint")]
        return [Difference("missing", "", "it is enabled here, and was disabled in the checkpoint")]

    def restore(self, value: Any, state: Any) -> None:
        if _is_switched(value, state):
            # Allowed, and nothing to take over.
            return
        try:
            value.load_state_dict(state)
        except (UnbrokenError, MemoryError):
            raise
        except Exception as error:
            kind = type(value)
            raise StateMismatchError(
                f"{kind.__module__}.{kind.__qualname__}: its load_state_dict() refuses the state of the "
                f"checkpoint: {type(error).__name__}: {error}",
                hint="build the object as it was when the state was saved, or begin it anew by fresh=; "
                "do not train on with what is restored only in part",
            ) from error


class ObjectHandler:
    """Instances of ordinary classes, which say nothing of their state: each attribute is kept, or refused."""

    name = "python.object"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = (), is_elsewhere: IsElsewhere = nowhere) -> None:
        self._codecs = tuple(codecs)
        self._is_elsewhere = is_elsewhere
        self._keys = ScriptKeys()

    def accepts(self, value: object) -> bool:
        # Those of a frozen dataclass and of an enumeration are not meant to change.
        if isinstance(value, type | enum.Enum) or dataclasses.is_dataclass(value):
            return False
        cls = type(value)
        return (hasattr(value, "__dict__") or bool(_slots(cls))) and not _has_hidden_state(cls)

    def state(self, value: Any) -> object:
        attributes = dict(_attributes(value))
        removed = self._keys.removed(value, attributes)
        return {
            # Without its module: a script is `__main__` when it is run, and has a name when it is imported.
            "class": type(value).__qualname__,
            "attributes": Marking(self._is_elsewhere).of(attributes),
            **({"removed": removed} if removed else {}),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        mine, theirs = type(value).__qualname__, state["class"]
        if mine != theirs:
            return [Difference("other", "", f"class {mine}, the checkpoint has class {theirs}")]
        unknown = () if hasattr(value, "__dict__") else state["attributes"].keys() - dict(_slots(type(value)))
        if unknown:
            return [
                Difference("unexpected", name, "the class has no slot for it") for name in sorted(unknown)
            ]
        return [*Misfits(self._codecs).of(dict(_attributes(value)), state["attributes"])]

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        live, loaded = dict(_attributes(value)), state["attributes"]
        kept = self._keys.kept(value, live, state.get("removed", ()))
        return [*new_in_script(live, loaded, kept, self._is_elsewhere, "attributes")]

    def restore(self, value: Any, state: Any) -> None:
        live, slots, removed = dict(_attributes(value)), dict(_slots(type(value))), state.get("removed", ())
        # The script may hold the list or tensor that stands there, as for a container.
        filling = Filling(self._codecs, self._keys.kept(value, live, removed))
        items = filling.items(live, state["attributes"], ())
        # Past the class's own __setattr__ and __delattr__, which may check or count.
        for name in live.keys() - items.keys():
            object.__delattr__(value, name)
        for name, item in items.items():
            if name in slots:
                slots[name].__set__(value, item)
            elif hasattr(value, "__dict__"):
                vars(value)[name] = item
        self._keys.note_removed(value, live, removed)


def python_handlers(
    codecs: Iterable[LeafCodec] = (), *, is_elsewhere: IsElsewhere = nowhere
) -> list[StateHandler]:
    """Return the handlers for plain Python objects, in the order in which they are asked.

    What `is_elsewhere` of the objects inside, such as random generators, has its state kept by others: the
    live one stays where it is.
    """
    codecs = tuple(codecs)
    return [
        StateDictHandler(),
        DataclassHandler(codecs, is_elsewhere),
        ContainerHandler(codecs, is_elsewhere),
        ObjectHandler(codecs, is_elsewhere),
    ]


def _is_switched(value: Any, state: object) -> bool:
    """Tell whether only one of both is of an enabled object, as gradient scalers are or not."""
    asked = getattr(value, "is_enabled", None)
    if not callable(asked) or not isinstance(state, dict):
        return False
    live = bool(value.state_dict())
    return live == bool(asked()) and live != bool(state)


def _split(state: Any) -> tuple[dict[Any, Any], list[list[object]]]:
    """Return the items of a state, and the places of what training removed."""
    return {key: item for key, item in state.items() if key != _REMOVED}, state.get(_REMOVED, [])


def _fields(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a dataclass, and its other attributes."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    others = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in fields}
    return fields, others


def _merged(value: Any) -> dict[str, Any]:
    fields, others = _fields(value)
    return fields | others


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
