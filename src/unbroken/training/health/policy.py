"""What a user says about the health of training: what to look for, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Action: TypeAlias = Literal["off", "warn", "stop", "roll-back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What is watched in training, and what is done where it is not well."""

    action: Action = "roll-back"
    loss: str = "loss"
    grad_norm: str = "grad_norm"
    max_rollbacks: int = 3
    rate_factor: float = 1.0
    rate_steps: int = 0
    resume_factor: float = 1.5
    resume_steps: int = 10
    replay: Callable[[Any], Any] | None = None
