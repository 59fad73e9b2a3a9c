"""All that the run needs from Keras, in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras

from unbroken.frameworks.family import Family
from unbroken.frameworks.keras import finite, rates
from unbroken.frameworks.keras.at_work import AtWork
from unbroken.frameworks.keras.fit_data import FitBatches, FitData
from unbroken.frameworks.keras.fit_state import FIT_PART, FitState
from unbroken.frameworks.keras.metrics import MetricHandler
from unbroken.frameworks.keras.models import ModelHandler
from unbroken.frameworks.keras.optimizer_settings import FirstRates
from unbroken.frameworks.keras.optimizers import OptimizerHandler
from unbroken.frameworks.keras.rates import LowerRates
from unbroken.frameworks.keras.schedules import ScheduleHandler
from unbroken.frameworks.keras.values import SeedHandler, VariableHandler
from unbroken.frameworks.keras.weights import KerasWeights
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler


class KerasFamily(Family):
    """Keras, on whichever framework is below it."""

    def own_parts(self, parts: Mapping[str, object], choices: Choices) -> Mapping[str, object]:
        compiled = {
            name: part for name, part in parts.items() if isinstance(part, keras.Model) and part.compiled
        }
        return {FIT_PART: FitState(choices, compiled)} if compiled else {}

    def handlers(self, parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
        first = FirstRates()
        return [
            ModelHandler(parts, choices, first),
            OptimizerHandler(parts, choices, first),
            MetricHandler(),
            SeedHandler(),
            VariableHandler(),
            ScheduleHandler(),
        ]

    def watch(self, parts: Mapping[str, object]) -> AtWork:
        return AtWork(parts)

    def lower_rates(
        self, parts: Mapping[str, object], factor: Callable[[], float]
    ) -> tuple[LowerRates | None, list[str]]:
        return LowerRates(parts, factor) if any(rates.optimizers_of(parts)) else None, []

    def highest_rate(self, parts: Mapping[str, object]) -> Callable[[], float | None] | None:
        return rates.HighestRate(parts)

    def has_scaler(self, parts: Mapping[str, object]) -> bool:
        return rates.has_scaler(parts)

    def step_watch(
        self, parts: Mapping[str, object], usual: Collection[str], before: Any, *, runs_eagerly: bool
    ) -> finite.StepWatch | None:
        if not any(isinstance(value, keras.Layer) for value in parts.values()):
            return None
        return finite.StepWatch(parts, usual, before, runs_eagerly=runs_eagerly)

    def bad_tensors(self, parts: Mapping[str, object]) -> list[str]:
        return finite.bad_tensors(parts)

    def bad_rows(self, batch: object, size: int) -> list[int]:
        return finite.bad_rows(batch, size)

    def weights(self, model: object) -> KerasWeights | None:
        return KerasWeights(model) if isinstance(model, keras.Layer) else None

    def resumable_loader(self, loader: object) -> Any:
        return FitBatches(loader) if isinstance(loader, FitData) else None


FAMILY = KerasFamily()
