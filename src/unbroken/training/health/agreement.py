"""One finding of those of all ranks, so that all of them do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from unbroken.training.health.findings import Finding, badness
from unbroken.training.ranks.group import Group

Agree: TypeAlias = Callable[[int, Finding | None], Finding | None]


def agreement(group: Group) -> Agree | None:
    """Return what makes one finding of those of all ranks, or None where there is one rank.

    Called in each step by every rank, at the same place: one small collective, and a second one only where
    something was found.
    """
    return None if group.is_alone else lambda step, finding: _agreed(group, step, finding)


def _agreed(group: Group, step: int, finding: Finding | None) -> Finding | None:
    if not any(found for (found,) in group.votes("in step", step, finding is not None)):
        return None
    return worst(group.gathered(finding))


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
