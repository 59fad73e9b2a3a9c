"""What an optimizer keeps: for each of the variables that it trains, and for itself.

Keras keeps one list of variables, in the order in which they were made. Here each belongs to the variable
that it was made for, which has a name: an optimizer is restored by that, and never by places in a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from unbroken.frameworks.keras.structure import dotted, unique

# What Keras has for every optimizer, and what is no variable for a trained one.
_NOT_SLOTS = frozenset({"_variables", "_trainable_variables", "_tracker"})
_RATE = "_learning_rate"
# Keras has it since 3.13; without it nothing is of this class.
_COPIES_WEIGHTS = getattr(keras.optimizers, "ScheduleFreeAdamW", ())


@dataclass(frozen=True, slots=True)
class Slots:
    """The variables of one optimizer: `trained` are those that it trains, in its order.

    `of_trained` has for each of them what is kept for it, by name; `own` is what is kept beside that. The
    learning rate is in neither: it is a setting.
    """

    trained: list[Any]
    of_trained: list[dict[str, Any]]
    own: dict[str, Any] = field(default_factory=dict)


def is_optimizer(value: object) -> bool:
    """Tell whether `value` is an optimizer of Keras, or of a class made from one."""
    return isinstance(value, keras.optimizers.Optimizer)


def optimizers_in(optimizer: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `optimizer` and those that it wraps, each with the way to it."""
    yield where, optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_optimizer(inner):
        yield from optimizers_in(inner, dotted(where, "inner_optimizer"))
    several = getattr(optimizer, "_inner_optimizers", None) or ()
    for index, one in enumerate(several):
        yield from optimizers_in(one, dotted(where, f"optimizers.{index}"))


def wraps_others(optimizer: Any) -> bool:
    """Tell whether `optimizer` leaves the steps to others."""
    return len(list(optimizers_in(optimizer))) > 1


def begin_at_weights(optimizer: Any) -> None:
    """Let what `optimizer` keeps as copies of weights, made when it was built, be copies of those of now."""
    for _, one in optimizers_in(optimizer):
        if isinstance(one, _COPIES_WEIGHTS) and one.built:
            for copy, variable in zip(one._momentums, one._trainable_variables, strict=True):
                if copy is not None:
                    copy.assign(variable)


def slots_of(optimizer: Any) -> Slots:
    """Return the variables of `optimizer`, without those of others that it wraps, which do the steps."""
    trained = [] if wraps_others(optimizer) else list(optimizer._trainable_variables)
    of_trained: list[dict[str, Any]] = [{} for _ in trained]
    rate = getattr(optimizer, _RATE, None)
    met = {id(rate), *map(id, trained)}
    own: dict[str, Any] = {}
    taken: set[str] = set()
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        if attribute in _NOT_SLOTS or id(value) in met:
            continue
        if isinstance(value, keras.Variable):
            met.add(id(value))
            own[unique(name, taken)] = value
        elif isinstance(value, list | tuple) and len(value) == len(trained):
            for kept, item in zip(of_trained, value, strict=True):
                if isinstance(item, keras.Variable) and id(item) not in met:
                    met.add(id(item))
                    kept[name] = item
    for variable in optimizer._variables:
        if id(variable) not in met:
            _place(variable, trained, of_trained, own, taken)
    return Slots(trained, of_trained, own)


def _place(
    variable: Any, trained: list[Any], of_trained: list[dict[str, Any]], own: dict[str, Any], taken: set[str]
) -> None:
    """Enter `variable`, which no attribute leads to, where its name says that it belongs.

    Keras begins the name of what is made for another variable with the path of that one.
    """
    fitting = [
        (len(prefix), -len(kept), index)
        for index, (one, kept) in enumerate(zip(trained, of_trained, strict=True))
        if variable.name.startswith(prefix := _prefix(one))
    ]
    if not fitting:
        own[unique(variable.name, taken)] = variable
        return
    # Of several with the same path, the one that has fewest so far: they are made in this order.
    _, _, index = max(fitting, key=lambda item: (item[0], item[1], -item[2]))
    names = set(of_trained[index])
    of_trained[index][unique(variable.name[len(_prefix(trained[index])) :], names)] = variable


def _prefix(variable: Any) -> str:
    path = getattr(variable, "path", None)
    return str(variable.name if path is None else path).replace("/", "_").replace(":", "_") + "_"
