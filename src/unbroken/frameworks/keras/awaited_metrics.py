"""The metrics that a compiled model makes with its first batch: filled then, before that batch is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.frameworks.keras.metrics import are_made, awaits_metrics
from unbroken.frameworks.keras.tensors import builds_in_traces, is_replicated, outside_of_functions

# What a model calls before it trains on the first batch, and before it counts anew.
_TRAIN, _RESET = "make_train_function", "reset_metrics"


@dataclass(eq=False, slots=True)
class _Waiting:
    """What a `model` that has still to make metrics gets, and the objects that tell when it makes them."""

    model: Any
    saved: Mapping[str, Any]
    fill: Callable[[set[str]], None]
    check: Callable[[], None]
    done: set[str] = field(default_factory=set)
    hooked: list[tuple[Any, str]] = field(default_factory=list)

    def hook(self, owner: Any, name: str, called: Callable[..., Any]) -> None:
        vars(owner).pop(name, None)
        method = getattr(owner, name)
        self.hooked.append((owner, name))
        # Not by setattr, by which a model tracks what it is given.
        vars(owner)[name] = lambda *args, **kwargs: called(method, *args, **kwargs)

    def unhook(self) -> None:
        for owner, name in self.hooked:
            vars(owner).pop(name, None)
        self.hooked = []


class AwaitedMetrics:
    """Fills metrics as soon as they are there."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def put(
        self,
        model: Any,
        saved: Mapping[str, Any],
        fill: Callable[[set[str]], None],
        check: Callable[[], None],
    ) -> None:
        """Fill what is there now by `fill`, and the rest by it once `model` has made it.

        `fill` passes over the names that it is given, and adds to them those that it has filled. `check` says
        whether what the model has made in the end is what was saved.
        """
        has_waited = self._let_go(model)
        waiting = _Waiting(model, saved, fill, check)
        fill(waiting.done)
        if not awaits_metrics(model):
            if has_waited:
                check()
        elif saved:
            self._waiting[id(model)] = waiting
            self._hook(waiting)

    def of(self, model: Any) -> Mapping[str, Any]:
        """Return what was saved of the metrics that `model` has still to make."""
        waiting = self._waiting.get(id(model))
        is_known = waiting is not None and waiting.model is model and bool(waiting.hooked)
        return waiting.saved if waiting is not None and is_known else {}

    def _hook(self, waiting: _Waiting) -> None:
        model = waiting.model

        def made(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if not is_replicated():
                self._fill(waiting)
            return result

        def train(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._fill(waiting)
            return result

        def reset(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Counted from nothing, as without the restart; fit is restored after that.
            waiting.unhook()
            return method(*args, **kwargs)

        waiting.hook(model, _TRAIN, train)
        waiting.hook(model, _RESET, reset)
        if builds_in_traces():
            return
        for owner in (model._compile_metrics, model._compile_loss):
            if owner is not None and not owner.built:
                waiting.hook(owner, "build", made)

    def _fill(self, waiting: _Waiting) -> None:
        with outside_of_functions():
            waiting.fill(waiting.done)
        if not awaits_metrics(waiting.model) and are_made(waiting.model):
            self._let_go(waiting.model)
            waiting.check()

    def _let_go(self, model: Any) -> bool:
        waiting = self._waiting.pop(id(model), None)
        if waiting is not None:
            waiting.unhook()
        return waiting is not None
