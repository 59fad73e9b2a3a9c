"""Variables of a strategy: one value to whoever uses it, in memory several copies, or several shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from unbroken.checkpoint.weights import REPLICAS
from unbroken.frameworks.tensorflow.processes import this_worker
from unbroken.rundir.tell import tell
from unbroken.state.handlers import Difference

_SHOWN = 3


def copies_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the copies of a variable, one for each replica; none if it has no copies."""
    return tuple(variable.values) if isinstance(variable, tf.distribute.DistributedValues) else ()


def is_of_workers(variable: Any) -> bool:
    """Tell whether other processes have copies of a variable, too: reading its value takes all of them."""
    copies = copies_of(variable)
    return bool(copies) and len(copies) < variable.distribute_strategy.num_replicas_in_sync


def shards_of(variable: Any) -> tuple[tf.Variable, ...]:
    """Return the shards, along the first axis, that a variable of parameter servers is made of, if it is."""
    # By its name: the class has no public one.
    return tuple(variable.variables) if type(variable).__name__ == "ShardedVariable" else ()


def is_variable(value: object) -> TypeGuard[Any]:
    """Tell whether `value` is a variable, of whatever strategy."""
    return isinstance(value, tf.Variable) or bool(shards_of(value))


def assign_value(variable: Any, value: Any) -> None:
    """Give `variable`, and each copy of it, the `value` of the same dtype and shape."""
    copies = copies_of(variable)
    if is_of_workers(variable):
        # Each process puts back its own: to assign to all might wait for the others.
        for copy in copies:
            copy.assign(value)
        return
    is_read_as_sum = (
        bool(copies)
        and variable.synchronization is tf.VariableSynchronization.ON_READ
        and variable.aggregation is tf.VariableAggregation.SUM
    )
    if not is_read_as_sum:
        variable.assign(value)
        return
    # All of it to one copy: divided among them, whole numbers would be rounded.
    first, *others = copies
    first.assign(value)
    for other in others:
        other.assign(tf.zeros_like(other))


def fill(variable: Any, loaded: Any) -> None:
    """Put a loaded array into `variable`; one of another shape was allowed, and the variable stays."""
    if variable.shape.is_compatible_with(loaded.shape):
        # Another dtype was allowed, too.
        assign_value(variable, loaded.astype(variable.dtype.as_numpy_dtype, copy=False))


def is_one_value(variable: Any) -> bool:
    """Tell whether the value that reading `variable` gives is all of it, for each of its copies."""
    copies = copies_of(variable)
    if is_of_workers(variable) and _is_on_read(variable):
        return False
    return len(copies) < 2 or not (_is_on_read(variable) or _differs(copies))


class Replicas:
    """The copies of variables that are not all alike. A state keeps each: it would not go on exactly.

    Such are those that are synchronized on read, and what layers gather from their part of each batch, as
    Keras's BatchNormalization does. The calls take variables by name; one object belongs to one handler.
    """

    def __init__(self) -> None:
        self._has_told = False

    def state(self, variables: Mapping[str, Any]) -> dict[str, list[tf.Variable | None]]:
        """Return the copies of those whose copies are not all alike; None for those of other processes."""
        kept = {
            name: _in_place(variable, copies_of(variable))
            for name, variable in variables.items()
            if not is_one_value(variable)
        }
        self._tell([name for name in kept if variables[name].trainable and not _is_on_read(variables[name])])
        return kept

    def differences(
        self, variables: Mapping[str, Any], state: Mapping[str, Sequence[Any]]
    ) -> list[Difference]:
        """Return why the copies in `state` cannot be put into those of `variables`."""
        live = {name: _count(variable) for name, variable in variables.items()}
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
        # Of several processes a checkpoint has no one value that all of them could go on from.
        is_parted = any(is_of_workers(variables[name]) or _has_absent(state.get(name, ())) for name in wrong)
        return [Difference("other" if is_parted else "shape", REPLICAS, text)]

    def restore(self, variables: Mapping[str, Any], state: Mapping[str, Sequence[Any]]) -> None:
        """Put each copy back, where there are as many; elsewhere all have the one value already."""
        for name, values in state.items():
            copies = copies_of(variables[name]) if name in variables else ()
            if copies and _count(variables[name]) == len(values):
                first = _first(variables[name])
                for copy, value in zip(copies, values[first : first + len(copies)], strict=True):
                    fill(copy, value)

    def _tell(self, drifted: Sequence[str]) -> None:
        if drifted and not self._has_told:
            self._has_told = True
            tell(
                f"the replicas have drifted apart: the copies of {_listed(drifted)} are not the same",
                "each copy is kept as it is; whatever trains them should do the same on every replica",
            )


def _has_absent(values: Sequence[Any]) -> bool:
    """Tell whether copies of other processes belong to those in a state, which are not in it."""
    return any(value is None for value in values)


def _count(variable: Any) -> int:
    """Return how many copies of a variable there are in all processes."""
    copies = copies_of(variable)
    return (
        int(variable.distribute_strategy.num_replicas_in_sync)
        if is_of_workers(variable)
        else len(copies) or 1
    )


def _first(variable: Any) -> int:
    """Return the place of the first copy of this process among all of them."""
    worker = this_worker() if is_of_workers(variable) else None
    return 0 if worker is None else worker.rank * len(copies_of(variable))


def _in_place(variable: Any, copies: Sequence[Any]) -> list[Any]:
    found: list[Any] = [None] * _count(variable)
    first = _first(variable)
    found[first : first + len(copies)] = copies
    return found


def _is_on_read(variable: Any) -> bool:
    return bool(variable.synchronization is tf.VariableSynchronization.ON_READ)


def _differs(copies: Sequence[tf.Variable]) -> bool:
    """Tell whether the copies do not all have the same bits.

    They are compared on the device of the first one: fetched to be compared, they would make each save wait.
    """
    with tf.device(copies[0].device):
        first, *others = (_bits(copy) for copy in copies)
        return not all(bool(tf.reduce_all(tf.equal(first, other))) for other in others)


def _bits(copy: tf.Variable) -> Any:
    # TensorFlow takes no bits of truth values, nor of numbers of eight bits with a point: these are fetched.
    if copy.dtype.size == 1 and not copy.dtype.is_integer:
        return np.asarray(copy.numpy()).reshape(-1).view(np.uint8)
    return tf.bitcast(copy, tf.uint8)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
