"""What layers learn by `adapt`, beside or instead of variables: statistics, vocabularies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import keras
import numpy as np

from unbroken.frameworks.keras.structure import places_of

_DIGEST_BYTES = 16
_NOTED = "_unbroken_vocabulary"
_FUNCTIONS = ("train_function", "test_function", "predict_function")


def use_filled_statistics(model: Any) -> None:
    """Let layers in `model` calculate with the statistics that their variables have now.

    A `Normalization` makes constants of its variables, as Keras knows when it loads a file. What a compiled
    model has traced with the old ones is traced again; a function of the user's own is not.
    """
    changed = [_finalize(place.layer) for place in places_of(model)]
    if any(changed):
        for name in _FUNCTIONS:
            if getattr(model, name, None) is not None:
                getattr(model, f"make_{name}")(force=True)


def _finalize(layer: Any) -> bool:
    if not isinstance(layer, keras.layers.Normalization) or layer.input_mean is not None or not layer.built:
        return False
    before = _constants(layer)
    layer.finalize_state()
    return not all(map(np.array_equal, before, _constants(layer)))


def _constants(layer: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(item) for item in (layer.mean, layer.variance)]


def vocabulary_of(layer: Any) -> str | None:
    """Return in short what `layer` looks up, in its order; None for one that looks up nothing."""
    table = getattr(getattr(layer, "_lookup_layer", layer), "lookup_table", None)
    if table is None or not callable(getattr(layer, "get_vocabulary", None)):
        return None
    # Each adapt makes another table. To read one takes long, and states are asked for at each save.
    known: str | None = vars(table).get(_NOTED)
    if known is None:
        known = vars(table)[_NOTED] = in_short(list(layer.get_vocabulary()))
    return known


def in_short(items: Sequence[Any]) -> str:
    """Return how many `items` there are, and a digest of them."""
    text = json.dumps([_plain(item) for item in items])
    return f"{len(items)} entries, digest {blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"


def _plain(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_plain(one) for one in item]
    if isinstance(item, bytes):
        return item.decode(errors="backslashreplace")
    return item.item() if isinstance(item, np.generic) else item
