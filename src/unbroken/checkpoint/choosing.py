"""Which checkpoints may be handed on to others, and which of them comes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from unbroken.checkpoint.highlights import non_finite_in_words, plain_metrics
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.retention import CheckpointFacts, KeepBest
from unbroken.rundir.rollbacks import Rollback, tainting
from unbroken.state.choices import matches
from unbroken.state.paths import name_of


def reason_against(
    manifest: Manifest, rollbacks: Sequence[Rollback], *, non_finite: Iterable[str] = ()
) -> str | None:
    """Return why a checkpoint is not to be handed on, or None if nothing is known against it.

    `rollbacks` are those of its run; `non_finite` are patterns of the names of tensors that may hold NaN
    or infinity.
    """
    patterns = tuple(non_finite)
    found = manifest.non_finite or {}
    bad = {path: count for path, count in found.items() if not matches(name_of(path), patterns)}
    if bad:
        return f"not finite: {non_finite_in_words(bad)}"
    if manifest.validation is not None and not manifest.validation.passed:
        return f"not validated: {manifest.validation.reason or 'the check of the script did not pass'}"
    return tainted_by(manifest.step, manifest.rollbacks, rollbacks)


def tainted_by(step: int, earlier: int, rollbacks: Sequence[Rollback]) -> str | None:
    """Return why a checkpoint of `step`, written after `earlier` roll-backs, is tainted, or None."""
    taint = tainting(rollbacks, step=step, earlier=earlier)
    if taint is None:
        return None
    return f"tainted: the run went back to step {taint.trusted_step}, {taint.reason}"


def facts_of(name: str, manifest: Manifest) -> CheckpointFacts:
    """Return what the choice between checkpoints is made by."""
    return CheckpointFacts(
        name=name,
        step=manifest.step,
        created=datetime.fromisoformat(manifest.created),
        metrics=plain_metrics(manifest.metrics),
        is_good=manifest.is_good,
    )


def best_first(checkpoints: Sequence[CheckpointFacts], best: KeepBest) -> list[str]:
    """Return the names of the checkpoints that have the metric of `best`, the best first."""
    if not checkpoints:
        return []
    return list(replace(best, count=len(checkpoints)).keeps(checkpoints))
