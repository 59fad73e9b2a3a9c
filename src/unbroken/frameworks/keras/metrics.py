"""Metrics: what they have summed up so far. Those of a compiled model are made with its first batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from unbroken.checkpoint.weights import REPLICAS
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.replicas import Replicas
from unbroken.frameworks.keras.structure import (
    by_attribute,
    dotted,
    has_automatic_name,
    places_of,
    snake_case,
    unique,
)
from unbroken.frameworks.keras.tensors import fill, has_value, source_of, tensor_differences
from unbroken.state.handlers import ORDER_VALUE, Difference, TensorFacts
from unbroken.state.tensors import TensorSource


def metric_variables(metric: Any) -> list[tuple[str, Any]]:
    """Return the variables of a metric, and of those inside, by their names there."""
    found = by_attribute(metric, metric._variables)
    for name, inner in by_attribute(metric, metric._metrics):
        found += [(dotted(name, below), variable) for below, variable in metric_variables(inner)]
    return found


def model_metrics(model: Any) -> list[tuple[str, Any]]:
    """Return the metrics of a model by name: those it was compiled with, of its losses, and of its layers."""
    taken: set[str] = set()
    compiled = [] if not getattr(model, "compiled", False) else _compiled_metrics(model)
    found = [(unique(_own_name(metric), taken), metric) for metric in compiled]
    for place in places_of(model):
        own = by_attribute(place.layer, place.layer._metrics)
        found += [(unique(dotted(place.name, name), taken), metric) for name, metric in own]
    return found


def _own_name(metric: Any) -> str:
    # Keras counts those without a name over the whole program.
    return snake_case(metric) if has_automatic_name(metric) else str(metric.name)


def _compiled_metrics(model: Any) -> list[Any]:
    tracker, compiled, losses = model._loss_tracker, model._compile_metrics, model._compile_loss
    return [
        *([] if tracker is None else [tracker]),
        *([] if compiled is None or not compiled.built else compiled.metrics),
        *([] if losses is None else losses.metrics),
    ]


def awaits_metrics(model: Any) -> bool:
    """Tell whether `model` will make metrics with its first batch."""
    compiled = getattr(model, "_compile_metrics", None)
    losses = getattr(model, "_compile_loss", None)
    return (compiled is not None and not compiled.built) or (losses is not None and not losses.built)


def are_made(model: Any) -> bool:
    """Tell whether all variables of the metrics of `model` are there: a stateless scope makes them later."""
    return all(has_value(item) for _, metric in model_metrics(model) for _, item in metric_variables(metric))


class MetricHandler:
    """`keras.metrics.Metric`, restored in place."""

    name = "keras.metric"
    order = ORDER_VALUE
    tensor_facts = TensorFacts(below="variables")

    def __init__(self) -> None:
        self._replicas = Replicas()

    def accepts(self, value: object) -> bool:
        return isinstance(value, keras.metrics.Metric)

    def state(self, value: Any) -> object:
        sources = _sources(value)
        return {"class": class_name(value), "variables": {**sources, **self._replicas.state(sources)}}

    def differences(self, value: Any, state: Any) -> list[Difference]:
        others = class_differences(value, state["class"])
        if others:
            return others
        saved = {name: item for name, item in state["variables"].items() if name != REPLICAS}
        return [
            *variable_differences(_sources(value), saved, "the metric"),
            *self._replicas.differences(dict(metric_variables(value)), state["variables"]),
        ]

    def restore(self, value: Any, state: Any) -> None:
        variables = dict(metric_variables(value))
        fill_variables(variables, state["variables"])
        self._replicas.restore(variables, state["variables"])


def _sources(metric: Any) -> dict[str, TensorSource]:
    return {name: source_of(variable) for name, variable in metric_variables(metric)}


def variable_differences(
    live: Mapping[str, TensorSource], saved: Mapping[str, Any], what: str
) -> list[Difference]:
    """Return how `saved` tensors differ from the `live` ones, by names, of `what` these are."""
    found = [Difference("missing", name, "the checkpoint lacks it") for name in live if name not in saved]
    found += [Difference("unexpected", name, f"{what} lacks it") for name in saved if name not in live]
    for name, source in live.items():
        if name in saved:
            found += tensor_differences(name, source, saved[name])
    return found


def fill_variables(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Fill the `live` variables from the `saved` tensors of the same names and shapes."""
    for name, variable in live.items():
        if name in saved and tuple(saved[name].shape) == tuple(variable.shape):
            fill(variable, saved[name])
