"""How weights that were read differ from those of a model, whatever framework it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unbroken.state.handlers import Difference

Kind = tuple[tuple[int, ...], str]


def weight_differences(
    live: Mapping[str, Any], found: Mapping[str, np.ndarray[Any, Any]], kind_of: Callable[[Any], Kind]
) -> list[Difference]:
    """Return how the arrays `found` differ from the variables `live` in names, shapes and dtypes.

    `kind_of` tells the shape of a variable and what its dtype is called, as NumPy or ml_dtypes calls it.
    """
    differences = [Difference("missing", name, "the source lacks it") for name in live if name not in found]
    for name, array in found.items():
        if name not in live:
            differences.append(Difference("unexpected", name, "the model lacks it"))
            continue
        shape, dtype = kind_of(live[name])
        if shape != array.shape:
            differences.append(
                Difference("shape", name, f"shape {shape}, the source has shape {array.shape}")
            )
        if dtype != array.dtype.name:
            differences.append(
                Difference("dtype", name, f"dtype {dtype}, the source has dtype {array.dtype.name}")
            )
    return differences
