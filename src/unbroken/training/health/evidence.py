"""What is known of a bad step at the moment it is found: which samples were in it, what is not finite now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from unbroken.training.consumption import place_of
from unbroken.training.health.findings import Finding
from unbroken.training.health.judging_replays import samples_in_words
from unbroken.training.passes import Pass
from unbroken.training.whole_state import WholeState


def with_evidence(finding: Finding, state: WholeState, found: Pass | None) -> Finding:
    """Return `finding` with the evidence in its text; `found` is the pass that the steps were taken in."""
    is_of_a_few_steps = finding.kind in ("non-finite", "spike")
    if finding.is_over or not is_of_a_few_steps:
        return finding
    known = []
    samples = [] if found is None else list(_samples(finding, state, found))
    if samples:
        known.append(f"samples {samples_in_words(samples)}")
    if finding.kind == "non-finite":
        bad = state.parts.bad_tensors()
        more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        known.append(f"not finite now: {bad[0]}{more}" if bad else "the model itself is finite")
    return replace(finding, text=f"{finding.text} ({'; '.join(known)})") if known else finding


def _samples(finding: Finding, state: WholeState, found: Pass) -> Iterator[Any]:
    """Yield the indices of the samples in the bad steps, as far as they are known."""
    batches = found.slot.batches
    for window in state.position.consumption.windows(finding.first_step, finding.step):
        if place_of(window) == found.place and batches is not None:
            for number in range(window.first, window.last + 1):
                yield from batches.samples(found.slot.number - number) or ()
