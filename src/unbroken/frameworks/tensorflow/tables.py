"""Lookup tables whose entries change: kept as sorted keys and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from unbroken.state.handlers import ORDER_VALUE, Difference

_KEYS, _VALUES = "keys", "values"
_KINDS = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)


def is_mutable_table(value: object) -> bool:
    """Tell whether `value` is a table that entries may be put into."""
    return isinstance(value, _KINDS)


def table_state(table: Any) -> dict[str, Any]:
    """Return the dtypes and entries of a table, in the order of the keys: its own changes by chance."""
    keys, values = _entries(table)
    order = sorted(range(len(keys)), key=lambda place: _sortable(keys[place]))
    return {
        "dtypes": [table.key_dtype.name, table.value_dtype.name],
        _KEYS: _plain(keys[order]),
        _VALUES: _plain(values[order]),
    }


def table_differences(name: str, table: Any, state: Mapping[str, Any]) -> list[Difference]:
    """Return why the entries of `state` cannot be put into `table`."""
    mine, theirs = [table.key_dtype.name, table.value_dtype.name], state["dtypes"]
    if mine == theirs:
        return []
    text = f"a table from {' to '.join(mine)}, the checkpoint has one from {' to '.join(theirs)}"
    return [Difference("other", name, text)]


def restore_table(table: Any, state: Mapping[str, Any]) -> None:
    """Put the entries of `state` in the place of those that `table` has."""
    present, _ = _entries(table)
    if len(present):
        table.remove(tf.constant(present, dtype=table.key_dtype))
    if len(state[_KEYS]):
        keys = tf.constant(state[_KEYS], dtype=table.key_dtype)
        table.insert(keys, tf.constant(state[_VALUES], dtype=table.value_dtype))


class TableHandler:
    """`tf.lookup.experimental.MutableHashTable` and `DenseHashTable` as parts of their own."""

    name = "tensorflow.table"
    order = ORDER_VALUE

    def accepts(self, value: object) -> bool:
        return is_mutable_table(value)

    def state(self, value: Any) -> object:
        return table_state(value)

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return table_differences("", value, state)

    def restore(self, value: Any, state: Any) -> None:
        restore_table(value, state)


def _entries(table: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    keys, values = (tensor.numpy() for tensor in table.export())
    # A dense table gives the places that are empty, too, and each key as a vector.
    free = [key for name in ("_empty_key", "_deleted_key") if (key := getattr(table, name, None)) is not None]
    used = np.ones(len(keys), bool)
    for key in free:
        keys = keys.reshape(len(keys), *np.shape(key))
        used &= (keys != np.asarray(key)).reshape(len(keys), -1).any(axis=1)
    return keys[used], values[used]


def _plain(entries: np.ndarray[Any, Any]) -> Any:
    """Return numbers as an array, texts, which are bytes here, as lists of them."""
    return entries.tolist() if entries.dtype == object else np.ascontiguousarray(entries)


def _sortable(key: Any) -> Any:
    return key if np.ndim(key) == 0 else key.tolist()
