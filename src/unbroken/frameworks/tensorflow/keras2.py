"""How a checkpoint of Keras 2 calls what Keras 3 calls otherwise: layers by number, moments as slots."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.interchange.tf_graph import ObjectGraph

_LAYER = "layer_with_weights-"
# Attributes of Keras 3, and what they were before.
_NAMES = {
    "_kernel": "kernel",
    "_embeddings": "embeddings",
    "_iterations": "iter",
    "_learning_rate": "learning_rate",
}
# What an optimizer of Keras 2 keeps for a variable, and the list in which one of Keras 3 has it.
_SLOTS = {
    "m": "momentums",
    "v": "velocities",
    "vhat": "velocity_hats",
    "momentum": "momentums",
    "accumulator": "accumulators",
}
# Numbers that an optimizer of Keras 3 does not keep as variables, because they never change.
SETTINGS = frozenset({"beta_1", "beta_2", "decay", "epsilon", "momentum", "rho"})


def name_there(child: str, there: Mapping[str, int]) -> str | None:
    """Return what a checkpoint with the children `there` calls the attribute `child`, None if it has none."""
    return next((name for name in (child, _NAMES.get(child, child)) if name in there), None)


def numbered_layers(model: Any, there: Mapping[str, int]) -> Iterator[tuple[str, Any, int]]:
    """Yield the name, layer and node of each layer with weights, if the children `there` have such."""
    if f"{_LAYER}0" not in there or not hasattr(model, "layers"):
        return
    for number, layer in enumerate(layer for layer in model.layers if layer.weights):
        name = f"{_LAYER}{number}"
        if name in there:
            yield name, layer, there[name]


def slots_here(
    optimizer: Any, graph: ObjectGraph, node: int, live_of: Mapping[int, Any]
) -> Iterator[tuple[str, Any, int]]:
    """Yield the name, the variable here and the node of each slot that has a place in `optimizer`.

    `live_of` are the variables here by their nodes. Only slots of an optimizer of the same class have one.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer) or not graph.nodes[node].slots:
        return
    from unbroken.frameworks.keras.slots import slots_of
    from unbroken.frameworks.keras.tensors import raw

    mine = slots_of(optimizer)
    kept = {id(raw(trained)): slots for trained, slots in zip(mine.trained, mine.of_trained, strict=True)}
    for slot in graph.nodes[node].slots:
        names = [attribute.full_name for attribute in graph.nodes[slot.slot].attributes]
        found = kept.get(id(live_of.get(slot.original)), {}).get(_SLOTS.get(slot.name, ""))
        if found is not None and any(_is_of_class(name, optimizer) for name in names):
            yield f"{slot.name}.{names[0]}", raw(found), slot.slot


def setting_here(optimizer: Any, name: str) -> float | None:
    """Return the number that `optimizer` has by itself where Keras 2 kept a variable, None if it has none."""
    if name == "decay":
        # Without one there is none, and it is called otherwise where there is.
        return 0.0
    value = getattr(optimizer, name, None) if name in SETTINGS else None
    return float(value) if isinstance(value, int | float) else None


def _is_of_class(full_name: str, optimizer: Any) -> bool:
    wanted = type(optimizer).__name__.lower()
    return any(re.sub(r"_\d+$", "", segment).lower() == wanted for segment in full_name.split("/"))
