"""What people want to see first of a manifest, from its encoded fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unbroken.state.paths import name_of


def plain_metrics(encoded: Mapping[str, Any]) -> dict[str, float]:
    """Return the encoded metrics of a manifest as numbers, NaN and infinities among them."""
    return {name: _number(value) for name, value in encoded.items()}


def _number(encoded: Any) -> float:
    if isinstance(encoded, dict):
        # Large integers, which manifests of earlier releases may hold, are kept as text, too.
        return float(encoded["$int"] if "$int" in encoded else encoded["$float"])
    return float(encoded)


def non_finite_in_words(found: Mapping[str, int]) -> str:
    """Return which tensors hold NaN or infinity, by their names, in one line; empty if there are none.

    >>> non_finite_in_words({"model/0.weight": 3, "model/0.bias": 1})
    'NaN or infinity in model.0.weight (3 of its numbers) and 1 other tensor'
    """
    if not found:
        return ""
    path, count = next(iter(found.items()))
    others = len(found) - 1
    more = f" and {others} other tensor{'s' * (others > 1)}" if others else ""
    return f"NaN or infinity in {name_of(path)} ({count} of its numbers){more}"


def learning_rates(states: Iterable[Any]) -> tuple[float, ...]:
    """Return the learning rates in the encoded states of parts, in their order."""
    rates: list[float] = []
    for state in states:
        # A compiled model of Keras has its optimizer with it.
        holder = state.get("(optimizer)", state) if isinstance(state, dict) else {}
        groups = holder.get("groups", []) if isinstance(holder, dict) else []
        for group in groups if isinstance(groups, list) else []:
            options = group.get("options", {}) if isinstance(group, dict) else {}
            rate = options.get("lr", options.get("learning_rate"))
            if isinstance(rate, int | float):
                rates.append(float(rate))
    return tuple(rates)
