"""One finding of those of all ranks, so that all of them do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from unbroken.training import families
from unbroken.training.health.findings import Finding, badness

Agree: TypeAlias = Callable[[Finding | None], Finding | None]


def agreement() -> Agree | None:
    """Return what makes one finding of those of all ranks, or None where there is one rank.

    Called in each step by every rank, at the same place: one small collective, and a second one only where
    something was found.
    """
    ranks = families.ranks()
    return None if ranks is None else lambda finding: _agreed(ranks, finding)


def _agreed(ranks: Any, finding: Finding | None) -> Finding | None:
    if not ranks.any(finding is not None):
        return None
    found = ranks.gather(None if finding is None else asdict(finding))
    return worst([None if one is None else Finding(**one) for one in found])


def worst(findings: Sequence[Finding | None]) -> Finding | None:
    """Return the worst of what was found by rank, the same on every rank, with the rank in its text.

    It leaves out the batches, and trusts the states, that suit all ranks whose findings ask for the same.
    """
    named = [
        replace(finding, text=f"rank {rank}: {finding.text}")
        for rank, finding in enumerate(findings)
        if finding is not None
    ]
    if not named:
        return None
    chosen = max(named, key=badness)
    alike = [finding for finding in named if finding.action == chosen.action]
    return replace(
        chosen,
        step=max(finding.step for finding in alike),
        first_step=min(finding.first_step for finding in alike),
        trusted_step=min(finding.trusted_step for finding in alike),
    )
