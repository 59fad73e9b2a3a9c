"""The watch over the numbers that training reports."""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.state.tree import Json
from unbroken.training.health.findings import Finding
from unbroken.training.health.policy import Health


class HealthWatch:
    """Looks at what `run.step` is given. `finding` is what is to be acted on, None while all is well."""

    def __init__(self, policy: Health) -> None:
        self.policy = policy
        self.finding: Finding | None = None

    def step(self, step: int, values: Mapping[str, int | float]) -> None:
        """Take the metrics of the step that is complete, the `step`-th of the run."""

    def state(self) -> Json:
        """Return what the watch of a resumed run goes on with, for the manifest."""
        return None

    def restore(self, state: Json) -> None:
        """Go on from the state of a checkpoint, after a resume or a roll-back."""
        self.finding = None
