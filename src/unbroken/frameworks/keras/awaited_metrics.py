"""The metrics that a compiled model makes with its first batch: filled then, before that batch is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unbroken.frameworks.keras.metrics import awaits_metrics

# What a model calls once all is built, and before it trains on the first batch.
_HOOK = "make_train_function"


class AwaitedMetrics:
    """Fills metrics as soon as they are there."""

    def put(self, model: Any, saved: Mapping[str, Any], fill: Callable[[], None]) -> None:
        """Fill what is there now by `fill`, and the rest by it once `model` has made all."""
        fill()
        if not saved or not awaits_metrics(model):
            return
        vars(model).pop(_HOOK, None)
        make = getattr(model, _HOOK)

        def made(*args: Any, **kwargs: Any) -> Any:
            vars(model).pop(_HOOK, None)
            result = make(*args, **kwargs)
            fill()
            return result

        # Not by setattr, by which a model tracks what it is given.
        vars(model)[_HOOK] = made
