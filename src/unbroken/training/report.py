"""The restore report: what a run went on from, what fits and what does not, for people and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.highlights import learning_rates
from unbroken.checkpoint.store import Checkpoint
from unbroken.training.comparison import PartReport, as_json
from unbroken.training.configuration import ChangedValue, differences_of
from unbroken.training.environment import changes, is_hazard
from unbroken.training.randomness import RNG_PART, generators_in
from unbroken.training.restored import Restored, SettingInForce

_KINDS = {
    "missing": "missing in the checkpoint, as the script built them",
    "unexpected": "in the checkpoint alone, left out",
    "shape": "of another shape, as the script built them",
    "dtype": "of another dtype, converted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored, and what is otherwise than it was.

    `passed_over` gives the reason for each newer checkpoint that was not taken; `died` are the attempts
    that ended while they restored this one. `learning_rates` are in force now; the others are those of
    the checkpoint, and those that the script had set before. `config` and `environment` list what
    changed since, `generators` the libraries, and the places in parts, whose random generators were restored.
    """

    checkpoint: str
    step: int
    epoch: int
    inside_epoch: bool
    parts: Mapping[str, PartReport]
    tensors: int
    size_bytes: int
    learning_rates: tuple[float, ...]
    checkpoint_learning_rates: tuple[float, ...]
    script_learning_rates: tuple[float, ...]
    settings: tuple[SettingInForce, ...]
    config: tuple[ChangedValue, ...]
    environment: tuple[ChangedValue, ...]
    generators: tuple[str, ...]
    passed_over: Mapping[str, str]
    died: tuple[int, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """What differs in settings, environment and config since the checkpoint, a line each."""
        return tuple(map(str, (*self.settings, *self.environment, *self.config)))

    def lines(self) -> list[str]:
        """Return the report for people, a line each."""
        where = f"inside epoch {self.epoch}" if self.inside_epoch else f"before epoch {self.epoch}"
        lines = [f"resumed from {self.checkpoint} (step {self.step}, {where})"]
        if self.died:
            lines.append(f"{died_of(self.died)}, this time it went well")
        lines += [f"{name} was passed over: {reason}" for name, reason in self.passed_over.items()]
        whole = [name for name, part in self.parts.items() if part.is_exact]
        lines.append(
            f"{', '.join(whole)}: {self.tensors:,} tensors, {self.size_bytes:,} bytes, "
            "read back and equal bit for bit"
        )
        for name, part in self.parts.items():
            lines += _part_lines(name, part)
        lines += self._rate_lines()
        hazards = [change.name for change in self.environment if is_hazard(change.name)]
        if hazards:
            lines.append(f"the bits of what follows may differ: {', '.join(hazards)} changed")
        return lines + [f"changed since: {line}" for line in self.changed]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; fields are only ever added."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "epoch": self.epoch,
            "inside_epoch": self.inside_epoch,
            "parts": {name: as_json(part) for name, part in self.parts.items()},
            "learning_rates": {
                "in_force": list(self.learning_rates),
                "checkpoint": list(self.checkpoint_learning_rates),
                "script": list(self.script_learning_rates),
            },
            "settings": [
                {
                    "part": found.part,
                    "key": found.setting.key,
                    "checkpoint": repr(found.setting.saved),
                    "script": repr(found.setting.script),
                    "in_force": "script" if found.script_wins else "checkpoint",
                }
                for found in self.settings
            ],
            "config": [_as_json(change) for change in self.config],
            "environment": [
                {**_as_json(change), "hazard": is_hazard(change.name)} for change in self.environment
            ],
            "generators": {"0": list(self.generators)},
            "passed_over": dict(self.passed_over),
            "died": list(self.died),
        }

    def _rate_lines(self) -> list[str]:
        if not self.learning_rates:
            return []
        line = f"learning rate {_rates(self.learning_rates)}"
        if self.checkpoint_learning_rates != self.learning_rates:
            line += f", in the checkpoint {_rates(self.checkpoint_learning_rates) or 'none'}"
        if self.script_learning_rates != self.learning_rates:
            line += f", in the script {_rates(self.script_learning_rates)}"
        if any(self.learning_rates):
            return [line]
        return [line, "every learning rate is 0: nothing is learned until a schedule raises one"]


def report(
    checkpoint: Checkpoint,
    restored: Restored,
    *,
    passed_over: Mapping[str, str],
    died: tuple[int, ...],
    environment: Mapping[str, Any],
    config: Any,
) -> RestoreReport:
    """Return the report on a restored checkpoint; `environment` and `config` are those of now, encoded."""
    manifest = checkpoint.manifest
    generators = manifest.parts[RNG_PART].state if RNG_PART in manifest.parts else {}
    exact = [part for part in restored.parts.values() if part.is_exact]
    return RestoreReport(
        checkpoint=checkpoint.name,
        step=manifest.step,
        epoch=manifest.position.epoch,
        inside_epoch=manifest.position.inside_epoch,
        parts=restored.parts,
        tensors=sum(part.matched.tensors for part in exact),
        size_bytes=sum(part.matched.size_bytes for part in exact),
        learning_rates=restored.learning_rates,
        checkpoint_learning_rates=learning_rates(entry.state for entry in manifest.parts.values()),
        script_learning_rates=restored.script_learning_rates,
        settings=restored.settings,
        config=tuple(differences_of(manifest.config, config, "config")),
        environment=tuple(changes(manifest.environment, environment)),
        generators=generators_in(generators),
        passed_over=passed_over,
        died=died,
    )


def died_of(died: tuple[int, ...]) -> str:
    """Say which attempts ended while they restored a checkpoint."""
    if len(died) == 1:
        return f"attempt {died[0]} died while it restored it"
    return f"attempts {', '.join(map(str, died))} died while they restored it"


def _part_lines(name: str, part: PartReport) -> list[str]:
    if part.is_fresh:
        return [f"{name}: begins as the script built it"]
    lines = []
    for kind, amount in part.differing.items():
        allowed = (item.name or "all of it" for item in part.allowed if item.kind == kind)
        names = list(dict.fromkeys(allowed))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        if amount.tensors:
            lines.append(f"{name}: {amount.tensors} {_KINDS[kind]} ({amount.size_bytes:,} bytes): {shown}")
        else:
            lines.append(f"{name}: {_KINDS[kind]}: {shown}")
    if lines and part.matched.tensors:
        lines.append(f"{name}: {part.matched.tensors:,} tensors restored ({part.matched.size_bytes:,} bytes)")
    return lines


def _rates(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _as_json(change: ChangedValue) -> dict[str, str]:
    return {"name": change.name, "then": repr(change.then), "now": repr(change.now)}
