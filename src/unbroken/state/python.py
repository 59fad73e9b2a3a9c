"""Handlers for plain Python objects: containers, dataclasses, anything with a state_dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from unbroken.state.handlers import ORDER_VALUE, StateHandler
from unbroken.state.tree import LeafCodec


class ContainerHandler:
    """Dictionaries, lists and sets, restored in place: tensors keep their identity where they fit."""

    name = "python.container"
    order = ORDER_VALUE

    def __init__(self, codecs: Iterable[LeafCodec] = ()) -> None:
        self._codecs = tuple(codecs)

    def accepts(self, value: object) -> bool:
        return isinstance(value, MutableMapping | list | set)

    def state(self, value: Any) -> object:
        if isinstance(value, MutableMapping):
            return dict(value)
        return set(value) if isinstance(value, set) else list(value)

    def differences(self, value: Any, state: Any) -> list[str]:
        expected = (
            "dict" if isinstance(value, MutableMapping) else "set" if isinstance(value, set) else "list"
        )
        found = type(state).__name__
        return [] if found == expected else [f"expected a {expected}, the checkpoint holds a {found}"]

    def restore(self, value: Any, state: Any) -> None:
        _fill(value, state, self._codecs)


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
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

    def differences(self, value: Any, state: Any) -> list[str]:
        expected = {field.name for field in dataclasses.fields(value)}
        found = set(state) if isinstance(state, dict) else set()
        return [f"field {name!r}: the checkpoint lacks it" for name in sorted(expected - found)] + [
            f"field {name!r}: the class lacks it" for name in sorted(found - expected)
        ]

    def restore(self, value: Any, state: Any) -> None:
        for name, item in state.items():
            # The script may hold the list or tensor that stands there, as for a container.
            setattr(value, name, _fill(getattr(value, name), item, self._codecs))


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

    def differences(self, value: Any, state: Any) -> list[str]:
        # What fits is known to the object alone: it judges in load_state_dict.
        return []

    def restore(self, value: Any, state: Any) -> None:
        value.load_state_dict(state)


def python_handlers(codecs: Iterable[LeafCodec] = ()) -> list[StateHandler]:
    """Return the handlers for plain Python objects, in the order in which they are asked."""
    codecs = tuple(codecs)
    return [StateDictHandler(), DataclassHandler(codecs), ContainerHandler(codecs)]


def _fill(live: Any, loaded: Any, codecs: Sequence[LeafCodec]) -> Any:
    """Return `loaded`, kept in the live containers and tensors where they are of the same kind."""
    if any(codec.assign(live, loaded) for codec in codecs):
        return live
    if isinstance(live, MutableMapping) and isinstance(loaded, dict):
        items = {key: _fill(live.get(key), item, codecs) for key, item in loaded.items()}
        live.clear()
        live.update(items)
        return live
    if isinstance(live, list) and isinstance(loaded, list):
        room = len(loaded) - len(live)
        pairs = zip(live + [None] * room, loaded, strict=False)
        live[:] = [_fill(old, new, codecs) for old, new in pairs]
        return live
    if isinstance(live, set) and isinstance(loaded, set):
        live.clear()
        live.update(loaded)
        return live
    return loaded
