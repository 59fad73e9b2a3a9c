"""References to tensors in encoded values, which are by path."""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.state.tree import Json


def with_references(encoded: Json, paths: Mapping[str, str]) -> Json:
    """Return `encoded` with references to other paths: `paths` maps old ones to new."""
    if isinstance(encoded, list):
        return [with_references(item, paths) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$tensor" in encoded:
        place = str(encoded["$tensor"])
        return {**encoded, "$tensor": paths.get(place, place)}
    return {key: with_references(item, paths) for key, item in encoded.items()}
