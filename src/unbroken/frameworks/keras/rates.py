"""The learning rates of the optimizers among the parts: looked at, and lower for the steps of a roll-back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import keras

from unbroken.frameworks.keras.optimizer_settings import present_rate
from unbroken.frameworks.keras.schedules import is_schedule
from unbroken.frameworks.keras.slots import is_optimizer, optimizers_in, wraps_others
from unbroken.rundir.tell import tell

# To calculate the rate of a schedule takes as long as a small step.
_STEPS_BETWEEN_LOOKS = 10


def optimizers_of(parts: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that are parts, or that models among these are compiled with, each once.

    Of one that wraps others, those.
    """
    seen: set[int] = set()
    for part, value in parts.items():
        found = value if is_optimizer(value) else _compiled_with(value)
        for _, one in optimizers_in(found) if found is not None else ():
            if id(one) not in seen and not wraps_others(one):
                seen.add(id(one))
                yield part, one


def _compiled_with(value: object) -> Any:
    is_compiled = isinstance(value, keras.Model) and getattr(value, "compiled", False)
    return getattr(value, "optimizer", None) if is_compiled else None


def has_scaler(parts: Mapping[str, object]) -> bool:
    """Tell whether something among `parts` leaves out steps whose gradients overflow."""
    scaling = keras.optimizers.LossScaleOptimizer
    return any(
        isinstance(value, scaling) or isinstance(_compiled_with(value), scaling) for value in parts.values()
    )


class HighestRate:
    """Returns, when it is called, the highest learning rate; of schedules that of a few steps ago."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._calls = 0
        self._of_schedules: dict[int, float | None] = {}

    def __call__(self) -> float | None:
        if self._calls % _STEPS_BETWEEN_LOOKS == 0:
            self._of_schedules.clear()
        self._calls += 1
        rates = [self._rate(optimizer) for _, optimizer in optimizers_of(self._parts)]
        return None if None in rates else max((rate for rate in rates if rate is not None), default=None)

    def _rate(self, optimizer: Any) -> float | None:
        if not is_schedule(optimizer._learning_rate):
            return present_rate(optimizer)
        if id(optimizer) not in self._of_schedules:
            self._of_schedules[id(optimizer)] = present_rate(optimizer)
        return self._of_schedules[id(optimizer)]


class LowerRates:
    """Multiplies the rates of the optimizers of `parts` by `factor()` inside their steps, until it is closed.

    What reads the rate elsewhere, such as callbacks and checkpoints, sees the own one. The factor is a
    variable, so that a step that is compiled reads it; compiled models are compiled anew with it.
    """

    def __init__(self, parts: Mapping[str, object], factor: Callable[[], float]) -> None:
        self._factor = factor
        self._lowered = [(part, _Lowered(optimizer)) for part, optimizer in optimizers_of(parts)]
        self._told: set[str] = set()
        self.refresh()
        for value in parts.values():
            if _compiled_with(value) is not None and getattr(value, "train_function", None) is not None:
                value.make_train_function(force=True)  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Take the factor of the step that comes."""
        factor = self._factor()
        for part, lowered in self._lowered:
            if lowered.has_stepped_past() and part not in self._told:
                self._told.add(part)
                tell(
                    f"the learning rate of {part} is not lowered: its steps are in a tf.function that was "
                    "traced before",
                    "start the run again: what is traced then has the lower rate",
                )
            lowered.factor.assign(factor)

    def close(self) -> None:
        """Lower no more."""
        for _, lowered in self._lowered:
            lowered.close()
        self._lowered = []


class _Lowered:
    """One optimizer that multiplies its rate by `factor` while it applies gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        strategy = getattr(optimizer, "_distribution_strategy", None)
        with nullcontext() if strategy is None else strategy.scope():
            self.factor = keras.Variable(1.0, trainable=False, dtype="float32", name="lowered")
        self._is_inside = False
        self._was_asked = False
        self._iterations = self._count()
        self._rate, self._apply = optimizer._get_current_learning_rate, optimizer._backend_apply_gradients
        # Past the optimizer's own way to set attributes, which tracks them.
        vars(optimizer).update(_get_current_learning_rate=self._lower, _backend_apply_gradients=self._step)

    def _lower(self) -> Any:
        rate = self._rate()
        return rate * keras.ops.cast(self.factor, "float32") if self._is_inside else rate

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._is_inside, self._was_asked = True, True
        try:
            return self._apply(*args, **kwargs)
        finally:
            self._is_inside = False

    def _count(self) -> int:
        return int(keras.ops.convert_to_numpy(self._optimizer._iterations))

    def has_stepped_past(self) -> bool:
        """Tell whether the optimizer has stepped without looking at the factor."""
        return not self._was_asked and self._count() > self._iterations

    def close(self) -> None:
        self.factor.assign(1.0)
        for name in ("_get_current_learning_rate", "_backend_apply_gradients"):
            vars(self._optimizer).pop(name, None)
