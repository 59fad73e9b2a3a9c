"""Which optimizers train the parts of a run without being parts themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from unbroken.frameworks.keras.class_names import class_name
from unbroken.frameworks.keras.optimizers import variable_names
from unbroken.frameworks.keras.schedules import is_schedule
from unbroken.frameworks.keras.slots import is_optimizer, optimizers_in, slots_of
from unbroken.frameworks.keras.tensors import raw

# So deep are objects looked into for an optimizer that they hold: themselves, and containers in them.
_DEPTH = 3


class AtWork:
    """Notes every optimizer that applies gradients, until it is closed. `parts` may still grow.

    A step in a tf.function is seen when that is traced.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._once_kept: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_closed = False
        self.has_news = False
        self._noting = self._put_note()

    def take_stepped(self) -> bool:
        """Return True: only the script knows when a step is complete, a traced one is not seen."""
        return True

    def lost(self) -> list[tuple[str, bool]]:
        """Return a line for each optimizer with a state that is no part.

        With each whether it is certain that no checkpoint will hold it: a part that has it inside may keep
        its state in a way of its own.
        """
        self.has_news = False
        names = variable_names(self._parts) if self._seen else {}
        kept = {id(one) for value in self._parts.values() for one in _kept_with(value)}
        found = []
        for optimizer in self._seen:
            trained = [names[id(raw(item))] for item in _trained(optimizer) if id(raw(item)) in names]
            is_kept = id(optimizer) in kept or id(raw(optimizer.iterations)) in names
            if is_kept:
                self._once_kept.add(optimizer)
            # Whose place another has taken since, as compile() does between two phases, is at work no more.
            if trained and optimizer not in self._once_kept and _has_state(optimizer):
                more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
                text = f"the state of a {class_name(optimizer)} that trains {trained[0]}{more}"
                found.append((text + self._where(optimizer), not self._is_inside_a_part(optimizer)))
        return found

    def close(self) -> None:
        """Note no more."""
        self._is_closed = True
        # One that another run has put around this one stays, and does nothing any more once all are closed.
        if vars(keras.optimizers.Optimizer).get("apply") is self._noting:
            del keras.optimizers.Optimizer.apply

    def _put_note(self) -> Any:
        apply = keras.optimizers.Optimizer.apply

        def noting(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply(optimizer, *args, **kwargs)
            if not self._is_closed and optimizer not in self._seen:
                self._seen.add(optimizer)
                self.has_news = True
            return result

        keras.optimizers.Optimizer.apply = noting
        return noting

    def _where(self, sought: object) -> str:
        """Say by which attribute of a model it can be passed, where there is one."""
        for part, value in self._parts.items():
            for name, item in vars(value).items() if isinstance(value, keras.Layer) else ():
                if item is sought:
                    return f" ({part}.{name}: pass it as well, {name}={part}.{name})"
        return ""

    def _is_inside_a_part(self, sought: object) -> bool:
        return any(item is sought for value in self._parts.values() for item in _held(value))


def _kept_with(value: object) -> Iterator[Any]:
    """Yield the optimizers that are kept with the part `value`."""
    is_compiled = isinstance(value, keras.Model) and getattr(value, "compiled", False)
    optimizer = getattr(value, "optimizer", None) if is_compiled else value
    if is_optimizer(optimizer):
        yield from (one for _, one in optimizers_in(optimizer))


def _trained(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "_trainable_variables", ()))


def _has_state(optimizer: Any) -> bool:
    """Tell whether steps of `optimizer` depend on those before, as those of plain SGD do not."""
    if is_schedule(getattr(optimizer, "_learning_rate", None)):
        return True
    slots = slots_of(optimizer)
    return any(slots.of_trained)


def _held(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield `value` and what its attributes and the containers in them hold, layers aside."""
    yield value
    if not depth or isinstance(value, keras.Layer | keras.Variable | str | bytes) or is_optimizer(value):
        return
    inner: Any = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    for item in (*inner, *getattr(value, "__dict__", {}).values()):
        yield from _held(item, depth - 1)
