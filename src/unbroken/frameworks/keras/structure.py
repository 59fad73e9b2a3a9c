"""The layers in a model and the variables in them, by names that say where they are.

Keras numbers what it is not given a name for, over the whole program: the same model, built a second time,
has other names. So a name here is the way from the model: the attribute that holds a layer, or in a
Sequential or functional model its place among those of its class. Where the user has named a layer of such a
model, that name stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

_T = TypeVar("_T")

# Where Keras itself notes what it has met on a layer or a metric.
_NOTES = frozenset(
    {"_layers", "_metrics", "_seed_generators", "_trainable_variables", "_non_trainable_variables"}
    | {"_tracker", "_variables", "_operations", "_operations_by_depth", "_nodes", "_nodes_by_depth"}
    | {"_inbound_nodes", "_outbound_nodes", "_functional", "_compiled_trainable_state", "_tracked"}
    | {"_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"}
    | {"_build_shapes_dict", "_call_has_context_arg", "_auto_config", "_compile_config", "optimizer"}
)
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Place:
    """A layer and its name: the way to it, empty for the first one."""

    name: str
    layer: Any


@dataclass(frozen=True, slots=True)
class Named:
    """A variable and its name. With `is_weight` it is one for Keras, too: not the state of a generator.

    With `is_for_training` an optimizer may train it, unless it is frozen; others are what layers gather.
    """

    name: str
    variable: Any
    is_weight: bool
    is_for_training: bool = False


def places_of(root: Any) -> list[Place]:
    """Return the layer `root` and each one inside once, by its first name, outer ones first."""
    found: dict[int, Place] = {}
    _collect(Place("", root), found)
    return list(found.values())


def _collect(place: Place, found: dict[int, Place]) -> None:
    if id(place.layer) in found:
        return
    found[id(place.layer)] = place
    for segment, child in inner_layers(place.layer):
        _collect(Place(dotted(place.name, segment), child), found)


def inner_layers(layer: Any) -> list[tuple[str, Any]]:
    """Return the layers right below `layer` by their names there."""
    tracked = list(layer._layers)
    if isinstance(layer, keras.Sequential) or _is_functional(layer):
        # Those for inputs have nothing to keep, and are made by Keras at times.
        graph = [one for one in tracked if not isinstance(one, keras.layers.InputLayer)]
        in_graph = {id(one) for one in layer.layers}
        named = list(zip(_segments(graph), graph, strict=True))
        beside = by_attribute(layer, [one for one in graph if id(one) not in in_graph])
        if not beside:
            return named
        return [item for item in named if id(item[1]) in in_graph] + beside
    return by_attribute(layer, tracked)


def named_variables(root: Any) -> list[Named]:
    """Return the variables of the layer `root`, each once, by its first name."""
    found: dict[int, Named] = {}
    for place in places_of(root):
        trained = set(map(id, place.layer._trainable_variables))
        for segment, variable in own_variables(place.layer):
            named = Named(
                dotted(place.name, segment), variable, is_weight=True, is_for_training=id(variable) in trained
            )
            found.setdefault(id(variable), named)
        generators = by_attribute(place.layer, place.layer._seed_generators)
        for segment, generator in generators:
            named = Named(dotted(place.name, segment), generator.state, is_weight=False)
            found.setdefault(id(generator.state), named)
    return list(found.values())


def own_variables(layer: Any) -> list[tuple[str, Any]]:
    """Return the variables of `layer` itself by their names there."""
    return by_attribute(layer, [*layer._trainable_variables, *layer._non_trainable_variables])


def by_attribute(owner: Any, wanted: Iterable[_T]) -> list[tuple[str, _T]]:
    """Return each of `wanted`, which `owner` holds, by the attribute that leads to it.

    What no attribute leads to has the name that it was given, or its number among those of its class.
    """
    left = {id(item): item for item in wanted}
    order = list(left)
    names: dict[int, str] = {}
    taken: set[str] = set()
    for attribute, value in vars(owner).items():
        if attribute not in _NOTES and not attribute.startswith("_self_"):
            for name, found in _inside(attribute.lstrip("_") or attribute, value, left, 0):
                if id(found) not in names:
                    names[id(found)] = unique(name, taken)
    for key in order:
        if key not in names:
            item: Any = left[key]
            names[key] = unique(snake_case(item) if has_automatic_name(item) else item.name, taken)
    return [(names[key], left[key]) for key in order]


def _inside(name: str, value: Any, wanted: Mapping[int, Any], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in wanted:
        yield name, value
    elif isinstance(value, Mapping) and depth < _DEEPEST:
        for key, item in value.items():
            yield from _inside(f"{name}.{key}", item, wanted, depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from _inside(f"{name}.{index}", item, wanted, depth + 1)


def _segments(layers: Iterable[Any]) -> list[str]:
    """Return a name for each of `layers`, which stand in an order that the model gives them."""
    everything = list(layers)
    taken = {layer.name for layer in everything if not has_automatic_name(layer)}
    return [
        unique(snake_case(layer), taken) if has_automatic_name(layer) else layer.name for layer in everything
    ]


def has_automatic_name(layer: Any) -> bool:
    """Tell whether Keras may have named `layer` by itself."""
    return re.fullmatch(rf"{re.escape(snake_case(layer))}(_\d+)?", layer.name) is not None


def snake_case(value: Any) -> str:
    """Return what Keras calls an object of this class where it is given no name."""
    name = re.sub(r"\W+", "", type(value).__name__)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def unique(name: str, taken: set[str]) -> str:
    """Return `name`, with a number if it is among those `taken`, and take it."""
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found


def dotted(outer: str, name: str) -> str:
    """Return the full name of what is called `name` in what is called `outer`."""
    return f"{outer}.{name}" if outer and name else outer or name


def _is_functional(layer: Any) -> bool:
    # Keras does not export the class; nothing else has both.
    return isinstance(layer, keras.Model) and hasattr(layer, "_operations_by_depth")
