"""When to save. Pure: progress in, yes or no out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unbroken.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the run stands when a policy is asked; `epochs` counts the completed ones.

    `seconds_since_save` is since the last checkpoint, or since the start of this attempt.
    """

    step: int
    saved_step: int
    epochs: int
    saved_epochs: int
    seconds_since_save: float


class SavePolicy(Protocol):
    """Tells whether a checkpoint is due; asked after each step and each epoch."""

    def is_due(self, progress: Progress) -> bool: ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save at each multiple of `steps` optimizer steps."""

    steps: int

    def __post_init__(self) -> None:
        _positive("EverySteps", self.steps)

    def is_due(self, progress: Progress) -> bool:
        return progress.step // self.steps > progress.saved_step // self.steps


@dataclass(frozen=True, slots=True)
class EveryEpochs:
    """Save at the end of each `epochs`-th epoch, when the body of the loop over epochs is done."""

    epochs: int = 1

    def __post_init__(self) -> None:
        _positive("EveryEpochs", self.epochs)

    def is_due(self, progress: Progress) -> bool:
        return progress.epochs // self.epochs > progress.saved_epochs // self.epochs


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save when `minutes` of wall time have passed since the last checkpoint."""

    minutes: float

    def __post_init__(self) -> None:
        _positive("EveryMinutes", self.minutes)

    def is_due(self, progress: Progress) -> bool:
        return progress.seconds_since_save >= 60 * self.minutes


class Due:
    """Whether one of `policies` wants the state of now, given when it last got one."""

    def __init__(self, policies: Sequence[SavePolicy]) -> None:
        self._policies = tuple(policies)
        self.taken(0, 0)

    def taken(self, step: int, epochs: int) -> None:
        """Note that the state at `step`, after `epochs` whole epochs, was taken just now."""
        self._step, self._epochs, self._at = step, epochs, time.monotonic()

    def is_due(self, step: int, epochs: int) -> bool:
        progress = Progress(
            step=step,
            saved_step=self._step,
            epochs=epochs,
            saved_epochs=self._epochs,
            seconds_since_save=time.monotonic() - self._at,
        )
        return any(policy.is_due(progress) for policy in self._policies)


def _positive(policy: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(
            f"{policy}: expected a number above 0, found {value!r}",
            hint="to save only at the end and on a stop, use save=[]",
        )
