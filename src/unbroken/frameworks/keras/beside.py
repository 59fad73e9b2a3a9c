"""What stands in the state of a model beside its variables, under names that no variable can have."""

from __future__ import annotations

LAYERS, SEEDS, OPTIMIZER, METRICS = "(layers)", "(seeds)", "(optimizer)", "(metrics)"


def is_beside(name: str) -> bool:
    """Tell whether what is called `name` in the state of a model is no weight of the model."""
    return name.startswith("(")
