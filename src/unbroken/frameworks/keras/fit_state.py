"""The part "fit" of a run with a Keras model: what checkpoints say of model.fit, for its callback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from unbroken.state.choices import Choices

FIT_PART = "fit"


class LiveFit(Protocol):
    """A call of model.fit that is going on, or was the latest."""

    def state(self) -> dict[str, Any]:
        """Return its state as nested plain values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state into it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What decides which state an optimizer has: its class, and the variables that are trained, by id."""

    optimizer: str
    trained: Mapping[int, str]


def compiled(model: Any) -> Compiled:
    """Return how `model` is compiled now."""
    trained = {id(variable): variable.path.replace("/", ".") for variable in model.trainable_variables}
    return Compiled(optimizer=type(model.optimizer).__qualname__, trained=trained)


class FitState:
    """What is known of model.fit: `kept` of a checkpoint, and `live` as soon as the callback has begun one.

    `begun` counts the calls of fit in this process; `choices` are the user's. `entered` says how each model
    was compiled as the run was entered, by the id of the model.
    """

    def __init__(self, choices: Choices, models: Mapping[str, Any]) -> None:
        self.choices = choices
        self.entered = {id(model): (name, compiled(model)) for name, model in models.items()}
        self.kept: dict[str, Any] = {}
        self.live: LiveFit | None = None
        self.begun = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of now."""
        return self.kept if self.live is None else self.live.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.kept = state
        if self.live is not None:
            self.live.restore(state)
