"""Variables of a strategy: one value to whoever uses it, in memory several copies, or several shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from unbroken.rundir.tell import tell
from unbroken.state.handlers import Difference

# Under this key a state holds the copies that are not all alike.
REPLICAS = "(replicas)"
_SHOWN = 3


def copies_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the copies of a variable, one for each replica; none if it has no copies."""
    return tuple(variable.values) if isinstance(variable, tf.distribute.DistributedValues) else ()


def shards_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the shards, along the first axis, that a variable of parameter servers is made of, if it is."""
    # By its name: the class has no public one.
    return tuple(variable.variables) if type(variable).__name__ == "ShardedVariable" else ()


def is_variable(value: object) -> TypeGuard[Any]:
    """Tell whether `value` is a variable, of whatever strategy."""
    return isinstance(value, tf.Variable) or bool(shards_of(value))


class Replicas:
    """The copies of variables that are not all alike. A state keeps each: it would not go on exactly.

    Such are those that are synchronized on read, and what layers gather from their part of each batch, as
    Keras's BatchNormalization does. The calls take variables by name; one object belongs to one handler.
    """

    def __init__(self) -> None:
        self._has_told = False

    def state(self, variables: Mapping[str, Any]) -> dict[str, list[tf.Variable]]:
        """Return the copies of those whose copies are not all alike."""
        kept = {
            name: list(copies)
            for name, variable in variables.items()
            if len(copies := copies_of(variable)) > 1 and (_is_on_read(variable) or not _are_alike(copies))
        }
        self._tell([name for name in kept if variables[name].trainable and not _is_on_read(variables[name])])
        return kept

    def differences(
        self, variables: Mapping[str, Any], state: Mapping[str, Sequence[Any]]
    ) -> list[Difference]:
        """Return why the copies in `state` cannot be put into those of `variables`."""
        live = {name: max(len(copies_of(variable)), 1) for name, variable in variables.items()}
        saved = {name: len(state.get(name, (None,))) for name in live}
        wrong = [
            name
            for name, variable in variables.items()
            if live[name] != saved[name] and (name in state or _is_on_read(variable))
        ]
        if not wrong:
            return []
        text = (
            f"{live[wrong[0]]} replicas, the checkpoint has a value of its own for each of "
            f"{saved[wrong[0]]} replicas of {_listed(wrong)}"
        )
        return [Difference("shape", REPLICAS, text)]

    def restore(self, variables: Mapping[str, Any], state: Mapping[str, Sequence[Any]]) -> None:
        """Put each copy back, where there are as many; elsewhere all have the one value already."""
        for name, values in state.items():
            copies = copies_of(variables[name]) if name in variables else ()
            if len(copies) == len(values):
                for copy, value in zip(copies, values, strict=True):
                    copy.assign(value)

    def _tell(self, drifted: Sequence[str]) -> None:
        if drifted and not self._has_told:
            self._has_told = True
            tell(
                f"the replicas have drifted apart: the copies of {_listed(drifted)} are not the same",
                "each copy is kept as it is; whatever trains them should do the same on every replica",
            )


def _is_on_read(variable: Any) -> bool:
    return bool(variable.synchronization is tf.VariableSynchronization.ON_READ)


def _are_alike(copies: Iterable[tf.Variable]) -> bool:
    """Tell whether all copies have the same bits, wherever they are."""
    first, *others = (copy.numpy().reshape(-1).view(np.uint8) for copy in copies)
    return all(np.array_equal(first, other) for other in others)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
