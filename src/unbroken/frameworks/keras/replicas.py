"""Variables of which a strategy of TensorFlow has a copy for each replica, where the copies are not alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras

from unbroken.checkpoint.weights import REPLICAS
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.keras.tensors import raw
from unbroken.state.handlers import Difference


class Replicas:
    """Keeps them; see its like of TensorFlow. On other frameworks there are none."""

    def __init__(self) -> None:
        if keras.config.backend() == "tensorflow":
            from unbroken.frameworks.tensorflow import distributed

            self._kept: distributed.Replicas | None = distributed.Replicas()
        else:
            self._kept = None

    def state(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a state has more for those of `sources` that are of variables whose copies differ."""
        if self._kept is None:
            return {}
        found = self._kept.state({name: source.live for name, source in sources.items()})
        return {REPLICAS: found} if found else {}

    def differences(self, variables: Mapping[str, Any], state: Mapping[str, Any]) -> list[Difference]:
        """Return why the copies in `state` cannot be put into those of the `variables` that are in it."""
        if self._kept is None:
            return []
        known = {name: variable for name, variable in variables.items() if name in state}
        return self._kept.differences(_raw(known), _copies(state))

    def restore(self, variables: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Put each copy back, after each variable has got its one value."""
        if self._kept is not None:
            self._kept.restore(_raw(variables), _copies(state))


def refuse_unlike(variable: Any) -> None:
    """Raise UnsupportedStateError for a variable of an optimizer that is another one on each replica."""
    if keras.config.backend() != "tensorflow":
        return
    from unbroken.frameworks.tensorflow.distributed import is_one_value

    if not is_one_value(raw(variable)):
        raise UnsupportedStateError(
            f"cannot keep {variable.path} of the optimizer, of which each replica has a value of its own",
            hint="add up gradients in the step itself, or leave gradient_accumulation_steps out: under a "
            "strategy each replica would have sums of its own",
        )


def kept_again(copies: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return loaded copies as a state has them, for variables that are not there yet."""
    from unbroken.frameworks.tensorflow.tensors import LoadedCopy

    return {
        # Those of other processes are not here.
        name: [None if value is None else LoadedCopy(value) for value in values]
        for name, values in copies.items()
    }


def build_optimizer(optimizer: Any, trained: Sequence[Any]) -> None:
    """Make the variables of `optimizer` as the first batch does: in the scope that it was made in."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    with nullcontext() if strategy is None else strategy.scope():
        optimizer.build(trained)


def _raw(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw(variable) for name, variable in variables.items()}


def _copies(state: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    found: Mapping[str, Sequence[Any]] = state.get(REPLICAS, {})
    return found
