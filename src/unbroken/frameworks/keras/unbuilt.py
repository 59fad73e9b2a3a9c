"""Layers that have no variables yet, as Keras makes these with the first call."""

from __future__ import annotations

from typing import Any

import keras

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.keras.structure import dotted, inner_layers, places_of


def refuse_unbuilt(model: Any, part: str) -> None:
    """Raise UnsupportedStateError, with the call to make, for a model that has no variables yet."""
    unbuilt = [place for place in places_of(model) if _is_unbuilt(place.layer)]
    if not unbuilt:
        return
    names = [dotted(part, place.name) for place in unbuilt]
    what = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
    if model.built:
        raise UnsupportedStateError(
            f"layers that have not been built, in a model that has ({what}): a call of the model does not "
            "use them, and there are no variables yet to keep or restore",
            hint=f"call {names[0]} itself on one batch, or its build(input_shape), before the run starts",
        )
    raise UnsupportedStateError(
        f"a model that has not been built ({what}): there are no variables yet to keep or restore",
        hint=f"call {part or 'model'}.build(input_shape), such as build((None, 784)), "
        "or the model itself on one batch, before the run starts",
    )


def _is_unbuilt(layer: Any) -> bool:
    # One of Keras that has no way of its own to be built makes no variables.
    if layer.built or (type(layer).build is keras.Layer.build and _is_of_keras(layer)):
        return False
    # One whose layers are called one by one is never built itself.
    inner = inner_layers(layer)
    return not (inner and not any(_is_unbuilt(one) for _, one in inner))


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"
