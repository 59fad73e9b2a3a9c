"""How the state of a live object is taken out and put back: one handler for each kind of object."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from unbroken.errors import UnsupportedStateError


class StateHandler(Protocol):
    """Knows one kind of live object.

    `name` is written to manifests and never changes. Parts are restored in ascending `order`:
    modules, then schedulers, then optimizers (whose learning rate must win), generators last.
    """

    @property
    def name(self) -> str: ...
    @property
    def order(self) -> int: ...

    def accepts(self, value: object) -> bool:
        """Tell whether this handler is for `value`."""
        ...

    def state(self, value: Any) -> object:
        """Return the state as nested plain values; live tensors may stand in it, nothing is copied."""
        ...

    def differences(self, value: Any, state: Any) -> list[str]:
        """Return why `state` does not fit `value`, a line each (where, expected, found); change nothing."""
        ...

    def restore(self, value: Any, state: Any) -> None:
        """Put `state`, which had no differences, into `value`."""
        ...


@runtime_checkable
class ComparesSettings(Protocol):
    """A handler whose objects have settings that a restore overwrites: their changes are reported."""

    def changed_settings(self, value: Any, state: Any) -> list[str]:
        """Return what the script set otherwise than the checkpoint, a line each."""
        ...


ORDER_MODULE = 10
ORDER_VALUE = 20
ORDER_SCHEDULER = 30
ORDER_OPTIMIZER = 40
ORDER_GENERATOR = 90


def choose_handler(part: str, value: object, handlers: Iterable[StateHandler]) -> StateHandler:
    """Return the first handler that accepts `value`; raise UnsupportedStateError naming the part."""
    for handler in handlers:
        if handler.accepts(value):
            return handler
    cls = type(value)
    raise UnsupportedStateError(
        f"part {part!r}: cannot keep an object of type {cls.__module__}.{cls.__qualname__}",
        hint=_hint(part, value),
    )


def _hint(part: str, value: object) -> str:
    if value is None or isinstance(value, int | float | str | bytes | tuple | frozenset):
        return (
            "a plain value cannot be changed in place: "
            f"pass {part}={{'value': {value!r}}} and use that dictionary"
        )
    if dataclasses.is_dataclass(value):
        return "a frozen dataclass cannot be changed in place: make it one that is not frozen"
    return "give its class state_dict() and load_state_dict(), or make it a dataclass"
