"""Batches as plain values: for those that no other process can read again."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from unbroken.errors import StateMismatchError, UnsupportedStateError


def kept_batch(batch: Any) -> list[dict[str, Any] | None]:
    """Return the arrays in `batch` as plain values. Raises UnsupportedStateError for arrays of objects."""
    return [None if leaf is None else _kept(leaf) for leaf in _leaves(batch)]


def batch_as_kept(like: Any, kept: list[dict[str, Any] | None]) -> Any:
    """Return the batch that was `kept`, nested as `like` is. Raises StateMismatchError if it cannot be."""
    if len(_leaves(like)) != len(kept):
        raise StateMismatchError(
            f"fit: expected a generator of batches of {len(kept)} arrays, found {len(_leaves(like))}",
            hint="resume with the data that the run began with",
        )
    return keras.tree.pack_sequence_as(like, [None if one is None else _array(one) for one in kept])


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = keras.tree.flatten(batch)
    return found


def _kept(leaf: Any) -> dict[str, Any]:
    array = np.asarray(leaf if isinstance(leaf, np.ndarray) else keras.ops.convert_to_numpy(leaf))
    if array.dtype.kind not in "biufc":
        raise UnsupportedStateError(
            f"fit: expected a generator of numbers, found an array of {array.dtype}",
            hint="give fit a keras.utils.PyDataset or a tf.data.Dataset",
        )
    return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


def _array(kept: dict[str, Any]) -> Any:
    return np.frombuffer(kept["bytes"], np.dtype(kept["dtype"])).reshape(kept["shape"]).copy()
