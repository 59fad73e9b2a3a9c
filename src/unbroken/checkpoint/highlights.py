"""What people want to see first of a manifest, from its encoded fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def plain_metrics(encoded: Mapping[str, Any]) -> dict[str, float]:
    """Return the encoded metrics of a manifest as numbers, NaN and infinities among them."""
    return {
        name: float(value["$float"] if isinstance(value, dict) else value) for name, value in encoded.items()
    }


def learning_rates(states: Iterable[Any]) -> tuple[float, ...]:
    """Return the learning rates in the encoded states of parts, in their order."""
    rates: list[float] = []
    for state in states:
        groups = state.get("groups", []) if isinstance(state, dict) else []
        for group in groups if isinstance(groups, list) else []:
            rate = group.get("options", {}).get("lr") if isinstance(group, dict) else None
            if isinstance(rate, int | float):
                rates.append(float(rate))
    return tuple(rates)
