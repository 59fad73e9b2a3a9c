"""Optimizers: class, settings, and variables by the *names* of those that they were made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.keras.class_names import class_differences, class_name
from unbroken.frameworks.keras.optimizer_settings import (
    EXCLUDED,
    FirstRates,
    changed_options,
    is_held,
    option_differences,
    options_of,
    override_options,
    put_options,
    put_rate,
    rate_differences,
    script_options,
    with_rate_horizon,
)
from unbroken.frameworks.keras.replicas import build_optimizer, refuse_unlike
from unbroken.frameworks.keras.slots import Slots, is_optimizer, optimizers_in, slots_of
from unbroken.frameworks.keras.structure import dotted, named_variables
from unbroken.frameworks.keras.tensors import fill, raw, source_of, tensor_differences
from unbroken.state.choices import Choices
from unbroken.state.handlers import (
    ORDER_OPTIMIZER,
    Difference,
    Horizon,
    Renamed,
    Setting,
    TensorFacts,
)
from unbroken.state.tensors import TensorSource
from unbroken.state.tree import join

# Stands among the names of trained variables for what an optimizer keeps beside them.
OWN = "(own)"
CLASS, GROUPS, STATE, PARAMS, OPTIONS, WHERE = "class", "groups", "state", "params", "options", "where"
_KIND_OF_RATE = "learning_rate"


class OptimizerState:
    """The state of one optimizer; `names` are those of the variables of the program, by identity.

    `rate_is_of_script()` tells whether the script's kind of learning rate is taken whatever was saved.
    """

    def __init__(
        self,
        optimizer: Any,
        names: Mapping[int, str],
        first: FirstRates,
        rate_is_of_script: Callable[[], bool] = lambda: False,
    ) -> None:
        self.optimizer = optimizer
        self._first = first
        self._rate_is_of_script = rate_is_of_script
        self._inner = list(optimizers_in(optimizer))
        self._slots = [slots_of(one) for _, one in self._inner]
        self._names = [self._named(slots, names) for slots in self._slots]

    @staticmethod
    def _named(slots: Slots, names: Mapping[int, str]) -> list[str]:
        found = []
        for index, variable in enumerate(slots.trained):
            name = names.get(id(raw(variable)))
            if name is None:
                raise UnsupportedStateError(
                    f"variable {index}, {getattr(variable, 'path', variable.name)} of shape "
                    f"{tuple(variable.shape)}, is trained by this optimizer and belongs to no part: "
                    "it would not be saved",
                    hint="pass its model, or the variable itself, as a keyword of Run",
                )
            found.append(name)
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Return for each optimizer inside its class, the names that it trains and its settings."""
        return [
            {
                CLASS: class_name(one),
                WHERE: where,
                # In which order it was given them decides nothing.
                PARAMS: sorted(names),
                OPTIONS: options,
            }
            for (where, one), names, options in zip(self._inner, self._names, self._options(), strict=True)
        ]

    def _options(self) -> list[dict[str, Any]]:
        return [
            options_of(one, self._first) | _exclusions(one, names, slots)
            for (_, one), names, slots in zip(self._inner, self._names, self._slots, strict=True)
        ]

    def variables(self) -> dict[str, dict[str, Any]]:
        """Return the variables by the names of those that they were made for, and by their own."""
        found: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for (where, _), names, slots in zip(self._inner, self._names, self._slots, strict=True):
            for name, kept in zip(names, slots.of_trained, strict=True):
                found.setdefault(name, {}).update({dotted(where, key): item for key, item in kept.items()})
            own |= {dotted(where, key): item for key, item in slots.own.items()}
        return {name: kept for name, kept in found.items() if kept} | {OWN: own}

    def sources(self, *, are_trained: bool) -> dict[str, dict[str, TensorSource]]:
        """Return the live variables as sources of bytes.

        Raises UnsupportedStateError for one of which each replica has a value of its own.
        """
        found: dict[str, dict[str, TensorSource]] = {}
        for name, kept in self.variables().items():
            for item in kept.values():
                refuse_unlike(item)
            is_trained = are_trained and name != OWN
            found[name] = {key: source_of(item, is_trained=is_trained) for key, item in kept.items()}
        return found

    def differences(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]
    ) -> list[Difference]:
        """Return why what was saved does not fit."""
        mine = [(where, class_name(one)) for where, one in self._inner]
        theirs = [(group[WHERE], group[CLASS]) for group in groups]
        if mine != theirs:
            here, there = (", ".join(cls for _, cls in found) for found in (mine, theirs))
            return [Difference("other", "", f"class {here}, the checkpoint has class {there}")]
        found: list[Difference] = []
        for (where, one), names, group in zip(self._inner, self._names, groups, strict=True):
            found += _name_differences(where, set(names), set(group[PARAMS]))
            found += option_differences(one, group[OPTIONS], where) if self._is_same(state) else []
            if not self._rate_is_of_script():
                found += rate_differences(one, group[OPTIONS], where)
        apart = {difference.name for difference in found}
        for name, kept in self.sources(are_trained=False).items():
            if name not in apart:
                found += _slot_differences(name, kept, state.get(name, {}))
        known = self.variables()
        found += [
            Difference(
                "unexpected", name, f"nothing is kept for it here, the checkpoint has {', '.join(saved)}"
            )
            for name, saved in state.items()
            if name not in known and name not in apart and saved
        ]
        return found

    def restore(self, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put what fits of what was saved into the optimizer."""
        is_same = self._is_same(state)
        for (_, one), group in zip(self._inner, groups, strict=True):
            if is_same:
                put_options(one, group[OPTIONS])
            if not self._keeps_rate(one, group):
                put_rate(one, group[OPTIONS], self._first)
        for name, kept in self.variables().items():
            saved = state.get(name, {})
            for key, variable in kept.items():
                if key in saved and tuple(saved[key].shape) == tuple(variable.shape):
                    fill(variable, saved[key])

    def _keeps_rate(self, one: Any, group: Mapping[str, Any]) -> bool:
        options = group[OPTIONS]
        return self._rate_is_of_script() and (is_held(options) or bool(rate_differences(one, options, "")))

    def _is_same(self, state: Mapping[str, Mapping[str, Any]]) -> bool:
        """Tell whether the optimizer makes the same variables as the one that was saved."""
        return _slot_names(self.variables()) == _slot_names(state)

    def changed_settings(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]], place: str
    ) -> list[Setting]:
        """Return what the script set otherwise; what was saved stands at the path `place`."""
        is_same = self._is_same(state)
        found: list[Setting] = []
        mine = zip(self._inner, self._options(), groups, strict=True)
        for index, ((where, one), options, group) in enumerate(mine):
            at = join(f"{place}/{index}", OPTIONS)
            keeps = self._keeps_rate(one, group)
            found += changed_options(
                one, options, group[OPTIONS], where, at, is_same=is_same, keeps_rate=keeps
            )
        return found

    def script_settings(self) -> list[Setting]:
        """Return all settings, as the script built the optimizer."""
        return [item for where, one in self._inner for item in script_options(one, where, self._first)]

    def override(self, settings: Sequence[Setting]) -> None:
        """Put `settings` of the script in force."""
        for where, one in self._inner:
            override_options(one, [item for item in settings if item.where == where], self._first)

    def with_horizon(self, how: Horizon) -> Callable[[], None]:
        """Return what puts `how` in force once all is restored."""
        finish = [with_rate_horizon(one, how) for _, one in self._inner]

        def put() -> None:
            for each in finish:
                each()

        return put


def _slot_names(found: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {key for kept in found.values() for key in kept}


def _exclusions(optimizer: Any, names: Sequence[str], slots: Slots) -> dict[str, Any]:
    """Return which of the trained variables do not decay."""
    if not getattr(optimizer, "weight_decay", None):
        return {}
    excluded = [
        name
        for name, variable in zip(names, slots.trained, strict=True)
        if not optimizer._use_weight_decay(variable)
    ]
    return {EXCLUDED: sorted(excluded)}


def _name_differences(where: str, mine: set[str], theirs: set[str]) -> list[Difference]:
    of = f" of {where}" if where else ""
    missing = f"the checkpoint lacks this variable{of}, which is trained here"
    unexpected = f"is trained in the checkpoint, not by this optimizer{of}"
    return [Difference("missing", name, missing) for name in sorted(mine - theirs)] + [
        Difference("unexpected", name, unexpected) for name in sorted(theirs - mine)
    ]


def _slot_differences(
    name: str, mine: Mapping[str, TensorSource], theirs: Mapping[str, Any]
) -> Iterator[Difference]:
    for key in mine.keys() - theirs.keys():
        yield Difference("missing", name, f"the checkpoint has no {key} for it")
    for key in theirs.keys() - mine.keys():
        yield Difference("unexpected", name, f"the optimizer has no {key} for it")
    for key in mine:
        if key in theirs:
            for one in tensor_differences(name, mine[key], theirs[key]):
                yield Difference(one.kind, name, f"{key}: {one.text}")


def variable_names(parts: Mapping[str, object]) -> dict[int, str]:
    """Return `id -> name` for the variables of all `parts`, and in containers and modules among them."""
    names: dict[int, str] = {}
    for part, value in parts.items():
        for name, variable in _variables_in(value):
            names.setdefault(id(raw(variable)), dotted(part, name))
    return names


def _variables_in(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.Layer):
        yield from ((item.name, item.variable) for item in named_variables(value))
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((str(key), item) for key, item in items if _is_variable(item))
    elif _is_variable(value):
        yield "", value
    elif keras.config.backend() == "tensorflow" and not is_optimizer(value):
        from unbroken.frameworks.tensorflow.content import content_of, is_open

        # A module, which knows its variables by their places as well.
        yield from content_of(value).variables.items() if is_open(value) else ()


def _is_variable(value: object) -> bool:
    return isinstance(value, keras.Variable) or (hasattr(value, "trainable") and hasattr(value, "assign"))


class OptimizerHandler:
    """`keras.optimizers.Optimizer`; `parts` is where the names of what it trains come from.

    One that has not been built is built for all that the one model among the parts trains, as Keras itself
    does with the first batch; where there are several, that is the user's to say.
    """

    name = "keras.optimizer"
    order = ORDER_OPTIMIZER
    tensor_facts = TensorFacts(below=STATE, are_trained=True)

    def __init__(self, parts: Mapping[str, object], choices: Choices, first: FirstRates) -> None:
        self._parts = parts
        self._choices = choices
        self._first = first

    def accepts(self, value: object) -> bool:
        return is_optimizer(value)

    def state(self, value: Any) -> object:
        state = self._of(value)
        return {
            CLASS: class_name(value),
            GROUPS: state.groups(),
            STATE: state.sources(are_trained=True),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        others = class_differences(value, state[CLASS])
        return others or self._of(value).differences(state[GROUPS], state[STATE])

    def restore(self, value: Any, state: Any) -> None:
        self._of(value).restore(state[GROUPS], state[STATE])

    def changed_settings(self, value: Any, state: Any) -> list[Setting]:
        return self._of(value).changed_settings(state[GROUPS], state[STATE], GROUPS)

    def script_settings(self, value: Any) -> list[Setting]:
        return self._of(value).script_settings()

    def override(self, value: Any, settings: Sequence[Setting]) -> None:
        self._of(value).override(settings)

    def with_horizon(self, value: Any, state: Any, how: Horizon) -> Callable[[], None]:
        return self._of(value).with_horizon(how)

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Renamed:
        moved = renamed_names(state[STATE], rename)
        below = join(part, STATE)
        paths = {
            join(join(below, old), key): join(join(below, new), key)
            for old, new in moved.items()
            for key in state[STATE][old]
        }
        variables = {moved[old]: kept for old, kept in state[STATE].items()}
        return Renamed({**state, GROUPS: renamed_groups(state[GROUPS], rename), STATE: variables}, paths)

    def _of(self, optimizer: Any) -> OptimizerState:
        if not optimizer.built:
            self._build(optimizer)
        return OptimizerState(
            optimizer,
            variable_names(self._parts),
            self._first,
            partial(self._rate_is_of_script, optimizer),
        )

    def _rate_is_of_script(self, optimizer: Any) -> bool:
        part = next((name for name, value in self._parts.items() if value is optimizer), "")
        return self._choices.overrides(f"{part}.{_KIND_OF_RATE}")

    def _build(self, optimizer: Any) -> None:
        models = [value for value in self._parts.values() if isinstance(value, keras.Layer)]
        part = next((name for name, value in self._parts.items() if value is optimizer), "optimizer")
        if len(models) != 1 or not models[0].trainable_variables:
            raise UnsupportedStateError(
                "an optimizer that has not been built: what it trains is not known yet, so that there is "
                "nothing to restore",
                hint=f"call {part}.build(model.trainable_variables) before the run starts",
            )
        build_optimizer(optimizer, models[0].trainable_variables)


def renamed_names(names: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, str]:
    """Return what each name of a trained variable becomes. Raises UsageError if two become one."""
    moved = {old: old if old == OWN else rename(old) for old in names}
    if len(set(moved.values())) < len(moved):
        doubled = next(new for new in moved.values() if list(moved.values()).count(new) > 1)
        raise UsageError(
            f"rename: expected a name of its own for each variable, found several that become {doubled}",
            hint="map each name of the checkpoint to another one",
        )
    return moved


def renamed_groups(groups: Sequence[Mapping[str, Any]], rename: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return encoded groups with the names of trained variables mapped."""
    found = []
    for group in groups:
        options = dict(group[OPTIONS])
        if EXCLUDED in options:
            options[EXCLUDED] = sorted(rename(name) for name in options[EXCLUDED])
        found.append({**group, PARAMS: sorted(rename(name) for name in group[PARAMS]), OPTIONS: options})
    return found
