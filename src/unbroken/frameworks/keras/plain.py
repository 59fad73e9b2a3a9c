"""The plain settings in the configuration of an object of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain_items(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config` that are numbers, texts, None, or lists of them."""
    return {str(key): _listed(item) for key, item in config.items() if _is_plain(item)}


def _is_plain(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return all(map(_is_plain, item))
    return item is None or type(item) in (bool, int, float, str)


def _listed(item: Any) -> Any:
    # Keras makes tuples of lists, and lists of tuples.
    return [_listed(one) for one in item] if isinstance(item, list | tuple) else item
