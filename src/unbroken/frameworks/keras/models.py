"""Models and layers: every variable by the way to it, and all that a compiled model has beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from unbroken.checkpoint.weights import FLAGS
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.keras.awaited_metrics import AwaitedMetrics
from unbroken.frameworks.keras.beside import LAYERS, METRICS, OPTIMIZER, SEEDS, is_beside
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.layer_settings import (
    FROZEN,
    freeze_again,
    frozen_layers,
    frozen_setting,
    layer_settings,
    settings_of_layers,
)
from unbroken.frameworks.keras.metrics import (
    awaits_metrics,
    fill_variables,
    metric_variables,
    model_metrics,
    variable_differences,
)
from unbroken.frameworks.keras.optimizer_settings import FirstRates
from unbroken.frameworks.keras.optimizers import (
    CLASS,
    GROUPS,
    OptimizerState,
)
from unbroken.frameworks.keras.renames import renamed_structure, with_suggestions
from unbroken.frameworks.keras.replicas import REPLICAS, Replicas
from unbroken.frameworks.keras.structure import Named, dotted, inner_layers, named_variables, places_of
from unbroken.frameworks.keras.tensors import raw, source_of
from unbroken.frameworks.keras.weight_files import FILE, FileLayout, layout_setting
from unbroken.state.choices import Choices
from unbroken.state.handlers import (
    ORDER_MODULE,
    Difference,
    Horizon,
    Renamed,
    Setting,
    TensorFacts,
)
from unbroken.state.tensors import TensorSource
from unbroken.state.tree import join


class ModelHandler:
    """`keras.Model` and `keras.layers.Layer`, restored in place.

    Kept are all variables, the states of seed generators among them, which layers are frozen, and of a
    compiled model its optimizer and its metrics, unless these are parts of their own.
    """

    name = "keras.model"
    order = ORDER_MODULE
    tensor_facts = TensorFacts(are_tied=True)

    def __init__(self, parts: Mapping[str, object], choices: Choices, first: FirstRates) -> None:
        self._parts = parts
        self._choices = choices
        self._first = first
        self._awaited = AwaitedMetrics()
        self._layout = FileLayout()
        self._replicas = Replicas()

    def accepts(self, value: object) -> bool:
        return isinstance(value, keras.Layer)

    def state(self, value: Any) -> object:
        refuse_unbuilt(value, self._part(value))
        optimizer = self._optimizer(value)
        sources = variable_sources(value)
        sources |= {_metric(name): source_of(variable) for name, variable in self._metrics(value).items()}
        return {
            **sources,
            FLAGS: {FROZEN: frozen_layers(value)},
            LAYERS: settings_of_layers(value),
            FILE: self._in_files(value),
            **({} if optimizer is None else _encoded_optimizer(optimizer)),
            **self._replicas.state(sources),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live = variable_sources(value)
        saved = {name: item for name, item in state.items() if not is_beside(name) or _is_seed(name)}
        found = variable_differences(live, saved, "the model")
        found = with_suggestions(self._part(value), settings_of_layers(value), state[LAYERS], found)
        return [
            *found,
            *self._structure_differences(value, state, found),
            *self._optimizer_differences(value, state),
            *self._metric_differences(value, state),
            *self._replicas.differences(self._all_variables(value), state),
        ]

    def restore(self, value: Any, state: Any) -> None:
        variables = _variables(value)
        fill_variables(variables, state)
        self._replicas.restore(variables, state)
        freeze_again(value, state[FLAGS][FROZEN])
        optimizer = self._optimizer(value)
        if optimizer is not None and OPTIMIZER in state:
            optimizer.restore(state[OPTIMIZER][GROUPS], _slots_in(state))
        saved = {name: item for name, item in state.items() if name.startswith(f"{METRICS}.")}
        self._awaited.put(value, saved, lambda: self._fill_metrics(value, state))

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        found = [*frozen_setting(value, state[FLAGS][FROZEN]), *layer_settings(value, state[LAYERS], LAYERS)]
        found += layout_setting(self._in_files(value), state[FILE], FILE)
        optimizer = self._optimizer(value)
        if optimizer is not None and OPTIMIZER in state:
            place = join(OPTIMIZER, GROUPS)
            found += optimizer.changed_settings(state[OPTIMIZER][GROUPS], _slots_in(state), place)
        if awaits_metrics(value):
            live = self._named_metrics(value)
            missing = [name for name in state if name.startswith(f"{METRICS}.") and name not in live]
            if missing:
                note = "metrics: they go on once the first batch has made them"
                places = (*missing, *([REPLICAS] if REPLICAS in state else []))
                found.append(Setting("metrics", None, None, note=note, places=places))
        return found

    def script_settings(self, value: Any) -> list[Setting]:
        optimizer = self._optimizer(value)
        own = [Setting(FROZEN, None, sorted(frozen_layers(value)))]
        return own + ([] if optimizer is None else optimizer.script_settings())

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        for setting in settings:
            if setting.key == FROZEN:
                freeze_again(value, setting.script)  # type: ignore[arg-type]
        optimizer = self._optimizer(value)
        if optimizer is not None:
            optimizer.override([setting for setting in settings if setting.key != FROZEN])

    def with_horizon(self, value: Any, state: Any, how: Horizon) -> Callable[[], None]:
        optimizer = self._optimizer(value)
        return (lambda: None) if optimizer is None else optimizer.with_horizon(how)

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Renamed:
        return renamed_structure(part, state, rename)

    def _structure_differences(
        self, value: Any, state: Mapping[str, Any], found: Sequence[Difference]
    ) -> Iterator[Difference]:
        mine, theirs = settings_of_layers(value), state[LAYERS]
        for name, layer in mine.items():
            if name in theirs and theirs[name][CLASS] != layer[CLASS]:
                text = (
                    f"a layer of class {layer[CLASS]}, the checkpoint has one of class {theirs[name][CLASS]}"
                )
                yield Difference("other", name, text)
        if not found and [*mine] != [*theirs] and {*mine} == {*theirs}:
            # Kind and name by which it can be allowed: every variable is there.
            orders = (", ".join(name for name in names if name) for names in (mine, theirs))
            here, there = orders
            yield Difference("unexpected", LAYERS, f"layers in the order {here}, in the checkpoint {there}")

    def _optimizer_differences(self, value: Any, state: Mapping[str, Any]) -> list[Difference]:
        optimizer, saved = self._optimizer(value), state.get(OPTIMIZER)
        if optimizer is None and saved is None:
            return []
        if optimizer is None or saved is None:
            return [self._only_one_optimizer(value, state)]
        others = class_differences(optimizer.optimizer, saved[CLASS], OPTIMIZER)
        if others:
            return others
        found = optimizer.differences(saved[GROUPS], _slots_in(state))
        return [Difference(one.kind, dotted(OPTIMIZER, one.name), one.text) for one in found]

    def _only_one_optimizer(self, value: Any, state: Mapping[str, Any]) -> Difference:
        if OPTIMIZER not in state:
            text = "the checkpoint lacks the state of the optimizer that the model is compiled with"
            return Difference("missing", OPTIMIZER, text)
        cls = state[OPTIMIZER][CLASS]
        if getattr(value, "optimizer", None) is not None:
            text = f"the checkpoint has the optimizer ({cls}) in this part, the program in one of its own"
        else:
            text = f"the checkpoint has the state of its optimizer ({cls}), the model is not compiled: "
            text += "call compile(optimizer=...) before the run starts"
        return Difference("unexpected", OPTIMIZER, text)

    def _metric_differences(self, value: Any, state: Mapping[str, Any]) -> list[Difference]:
        if OPTIMIZER in state and not getattr(value, "compiled", False):
            # That is told of the optimizer.
            return []
        live = {_metric(name): source_of(item) for name, item in self._metrics(value).items()}
        saved = {name: item for name, item in state.items() if name.startswith(f"{METRICS}.")}
        found = variable_differences(live, saved, "the model")
        # Until the first batch the model has some that the checkpoint has not seen, and the other way round.
        return [
            one
            for one in found
            if one.kind not in ("missing", "unexpected") or (saved and not awaits_metrics(value))
        ]

    def _metrics(self, value: Any) -> dict[str, Any]:
        own = {id(part) for part in self._parts.values()}
        return {
            dotted(name, below): variable
            for name, metric in model_metrics(value)
            if id(metric) not in own
            for below, variable in metric_variables(metric)
        }

    def _fill_metrics(self, value: Any, state: Mapping[str, Any]) -> None:
        metrics = self._named_metrics(value)
        fill_variables(metrics, state)
        self._replicas.restore(metrics, state)

    def _all_variables(self, value: Any) -> dict[str, Any]:
        return {**_variables(value), **self._named_metrics(value)}

    def _named_metrics(self, value: Any) -> dict[str, Any]:
        return {_metric(name): variable for name, variable in self._metrics(value).items()}

    def _optimizer(self, value: Any) -> OptimizerState | None:
        """Return the optimizer that `value` is compiled with, unless it is a part of its own."""
        optimizer = getattr(value, "optimizer", None) if getattr(value, "compiled", False) else None
        if optimizer is None or any(optimizer is part for part in self._parts.values()):
            return None
        if not optimizer.built:
            # As Keras does with the first batch.
            optimizer.build(value.trainable_variables)
        names = {id(raw(item.variable)): item.name for item in named_variables(value)}
        part = self._part(value)
        rate = f"{part}.learning_rate"
        return OptimizerState(optimizer, names, self._first, lambda: self._choices.overrides(rate))

    def _in_files(self, value: Any) -> list[str]:
        weights = [item.variable for item in named_variables(value) if item.is_weight]
        return self._layout.of(value, weights)

    def _part(self, value: Any) -> str:
        return next((name for name, other in self._parts.items() if other is value), "")


def variable_sources(model: Any) -> dict[str, TensorSource]:
    """Return the variables of a model or layer as sources of bytes, by name."""
    return {
        _key(item): source_of(
            item.variable,
            is_frozen=item.is_weight and not item.variable.trainable,
            is_trained=item.is_weight and bool(item.variable.trainable),
        )
        for item in named_variables(model)
    }


def _variables(model: Any) -> dict[str, Any]:
    return {_key(item): item.variable for item in named_variables(model)}


def _key(item: Named) -> str:
    return item.name if item.is_weight else dotted(SEEDS, item.name)


def _is_seed(name: str) -> bool:
    return name.startswith(f"{SEEDS}.")


def refuse_unbuilt(model: Any, part: str) -> None:
    """Raise UnsupportedStateError, with the call to make, for a model that has no variables yet."""
    unbuilt = [place for place in places_of(model) if _is_unbuilt(place.layer)]
    if not unbuilt:
        return
    names = [dotted(part, place.name) for place in unbuilt]
    what = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
    raise UnsupportedStateError(
        f"a model that has not been built ({what}): there are no variables yet to keep or restore",
        hint=f"call {part or 'model'}.build(input_shape), such as build((None, 784)), "
        "or the model itself on one batch, before the run starts",
    )


def _is_unbuilt(layer: Any) -> bool:
    # One whose layers are called one by one is never built itself.
    inner = inner_layers(layer)
    return not layer.built and not (inner and all(one.built for _, one in inner))


def _encoded_optimizer(optimizer: OptimizerState) -> dict[str, Any]:
    sources = optimizer.sources(are_trained=True)
    return {
        OPTIMIZER: {CLASS: class_name(optimizer.optimizer), GROUPS: optimizer.groups()},
        **{dotted(OPTIMIZER, name): kept for name, kept in sources.items()},
    }


def _slots_in(state: Mapping[str, Any]) -> dict[str, Any]:
    before = f"{OPTIMIZER}."
    return {name.removeprefix(before): kept for name, kept in state.items() if name.startswith(before)}


def _metric(name: str) -> str:
    return dotted(METRICS, name)
