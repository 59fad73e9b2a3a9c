"""What a script has said about its run, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from unbroken.checkpoint.retention import RetentionPolicy
from unbroken.rundir.rehearsal import Plan
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.tree import Json
from unbroken.training.full_disk import FullDiskPolicy
from unbroken.training.health.policy import Health
from unbroken.training.memory_guard import MemoryGuardPolicy
from unbroken.training.save_policy import SavePolicy

# How much of what was just written is read back: nothing, some tensors of it, or all.
VerifyPolicy: TypeAlias = Literal["off", "sampled", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `Run`, by their names there; `values` are the parts, `plan` that of a rehearsal."""

    directory: Path
    save: tuple[SavePolicy, ...] | Literal["auto"]
    keep: tuple[RetentionPolicy, ...]
    snapshot: tuple[SavePolicy, ...]
    resume: str
    start_from: Path | None
    config: Json
    background: bool
    full_disk: FullDiskPolicy
    memory_budget_bytes: int | None
    memory_guard: MemoryGuardPolicy
    health: Health | None
    validate: Callable[[], object] | None
    verify: VerifyPolicy
    handlers: tuple[StateHandler, ...]
    choices: Choices
    values: Mapping[str, Any]
    plan: Plan | None
