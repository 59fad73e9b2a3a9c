"""Models and layers: every variable by the way to it, and all that a compiled model has beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from unbroken.checkpoint.weights import FLAGS, REPLICAS
from unbroken.errors import StateMismatchError
from unbroken.frameworks.keras.adapted import use_filled_statistics
from unbroken.frameworks.keras.awaited_metrics import AwaitedMetrics
from unbroken.frameworks.keras.beside import LAYERS, METRICS, OPTIMIZER, SEEDS, is_beside
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.layer_settings import (
    FROZEN,
    SETTINGS,
    VOCABULARY,
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
from unbroken.frameworks.keras.replicas import Replicas, build_optimizer, kept_again
from unbroken.frameworks.keras.slots import begin_at_weights, is_optimizer
from unbroken.frameworks.keras.structure import Named, dotted, named_variables
from unbroken.frameworks.keras.tensors import has_value, raw, source_of
from unbroken.frameworks.keras.unbuilt import refuse_unbuilt
from unbroken.frameworks.keras.untracked import Untracked
from unbroken.frameworks.keras.weight_files import FILE, FileLayout, layout_setting
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import (
    ORDER_MODULE,
    Difference,
    Horizon,
    Renamed,
    Setting,
    TensorFacts,
)
from unbroken.state.tensors import HostTensor, TensorSource
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
        self._untracked = Untracked()
        self._replicas = Replicas()

    def accepts(self, value: object) -> bool:
        return isinstance(value, keras.Layer)

    def state(self, value: Any) -> object:
        refuse_unbuilt(value, self._part(value))
        self._untracked.note(value)
        optimizer = self._optimizer(value)
        sources = variable_sources(value)
        sources |= {_metric(name): source_of(variable) for name, variable in self._metrics(value).items()}
        replicas = self._replicas.state(sources)
        waiting = {name: item for name, item in self._awaited.of(value).items() if name not in sources}
        if copies := waiting.pop(REPLICAS, {}):
            replicas = {REPLICAS: {**kept_again(copies), **replicas.get(REPLICAS, {})}}
        return {
            **sources,
            **{name: _as_source(item) for name, item in waiting.items()},
            FLAGS: {FROZEN: frozen_layers(value)},
            LAYERS: settings_of_layers(value),
            FILE: self._in_files(value),
            **({} if optimizer is None else _encoded_optimizer(optimizer)),
            **replicas,
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        live = variable_sources(value)
        saved = {name: item for name, item in state.items() if not is_beside(name) or _is_seed(name)}
        found = [one for one in variable_differences(live, saved, "the model") if not _is_unused_seed(one)]
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
        use_filled_statistics(value)
        freeze_again(value, state[FLAGS][FROZEN])
        optimizer = self._optimizer(value)
        self._begin_at_weights(optimizer)
        if optimizer is not None and OPTIMIZER in state:
            optimizer.restore(state[OPTIMIZER][GROUPS], _slots_in(state))
        self._put_metrics(value, state)

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        found = [*frozen_setting(value, state[FLAGS][FROZEN]), *layer_settings(value, state[LAYERS], LAYERS)]
        found += layout_setting(self._in_files(value), state[FILE], FILE)
        optimizer = self._optimizer(value)
        if optimizer is not None and OPTIMIZER in state:
            place = join(OPTIMIZER, GROUPS)
            found += optimizer.changed_settings(state[OPTIMIZER][GROUPS], _slots_in(state), place)
        live = variable_sources(value)
        for name in state:
            if _is_seed(name) and name not in live:
                note = f"{name}: left out, no layer draws from it any more"
                found.append(Setting(name, None, None, note=note, places=(name,)))
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

    def unkept_changes(self, value: Any) -> list[str]:
        return self._untracked.changes(self._part(value), value)

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
            elif name in theirs and (told := _vocabulary_difference(layer[SETTINGS], theirs[name][SETTINGS])):
                yield Difference("other", name, told)
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
        here = {item.name for item in named_variables(value) if item.is_weight}
        names = f"{dotted(self._part(value), OPTIMIZER)}*"
        way_out = f"; if it is for a later fit to train it, allow=['{names}'] leaves it to that"
        return [
            Difference(
                one.kind,
                dotted(OPTIMIZER, one.name),
                one.text + (way_out if one.kind == "unexpected" and one.name in here else ""),
            )
            for one in found
        ]

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
        saved = {name: item for name, item in state.items() if _is_metric(name)}
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

    def _begin_at_weights(self, compiled_with: OptimizerState | None) -> None:
        """Let optimizers that copied weights when they were built copy them again, unless restored later."""
        own = [] if compiled_with is None else [compiled_with.optimizer]
        for one in (*own, *filter(is_optimizer, self._parts.values())):
            begin_at_weights(one)

    def _put_metrics(self, value: Any, state: Mapping[str, Any]) -> None:
        saved = {name: item for name, item in state.items() if _is_metric(name)}
        before = self._named_metrics(value).keys()
        # One that was written before the first batch has none of those that this makes.
        is_of_batches = bool(saved.keys() - before)
        copies = {name: item for name, item in state.get(REPLICAS, {}).items() if _is_metric(name)}
        self._awaited.put(
            value,
            {**saved, **({REPLICAS: copies} if copies else {})},
            lambda done: self._fill_metrics(value, state, done),
            lambda: self._check_metrics(value, saved if is_of_batches else {}),
        )

    def _check_metrics(self, value: Any, saved: Mapping[str, Any]) -> None:
        """Raise StateMismatchError where the metrics that the first batch made are not those `saved`."""
        live = {name: source_of(item) for name, item in self._named_metrics(value).items()}
        part = self._part(value)
        found = [
            f"{part}: {one.name}: {one.text}"
            for one in variable_differences(live, saved, "the model")
            if saved and not matches(dotted(part, one.name), self._choices.allow)
        ]
        if found:
            raise StateMismatchError(
                "the metrics that the first batch made are not those of the checkpoint: " + "; ".join(found),
                hint=f"compile with the same metrics, or say allow=['{part}.{METRICS}.*']",
            )

    def _fill_metrics(self, value: Any, state: Mapping[str, Any], done: set[str]) -> None:
        named = self._named_metrics(value)
        metrics = {name: item for name, item in named.items() if name not in done and has_value(item)}
        fill_variables(metrics, state)
        self._replicas.restore(metrics, state)
        done.update(metrics)

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
            build_optimizer(optimizer, value.trainable_variables)
        names = {id(raw(item.variable)): item.name for item in named_variables(value)}
        part = self._part(value)
        rate = f"{part}.learning_rate"
        return OptimizerState(optimizer, names, self._first, lambda: self._choices.overrides(rate))

    def _in_files(self, value: Any) -> list[str | list[str]]:
        weights = [item.variable for item in named_variables(value) if item.is_weight]
        return self._layout.of(value, weights)

    def _part(self, value: Any) -> str:
        return next((name for name, other in self._parts.items() if other is value), "")


def variable_sources(model: Any) -> dict[str, TensorSource]:
    """Return the variables of a model or layer as sources of bytes, by name."""
    return {
        _key(item): source_of(
            item.variable,
            is_frozen=item.is_for_training and not item.variable.trainable,
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


def _is_unused_seed(difference: Difference) -> bool:
    return difference.kind == "unexpected" and _is_seed(difference.name)


def _is_metric(name: str) -> bool:
    return name.startswith(f"{METRICS}.")


def _as_source(item: Any) -> HostTensor:
    return HostTensor(str(item.dtype), tuple(item.shape), item.data)


def _vocabulary_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    here, there = mine.get(VOCABULARY), theirs.get(VOCABULARY)
    if there is None or here == there:
        return ""
    return (
        f"a vocabulary of {here}, the checkpoint has one of {there}: save get_vocabulary() beside the data, "
        "and build the layer with it"
    )


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
