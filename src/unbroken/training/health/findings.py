"""What the watch over training has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from unbroken.training.health.policy import Action, Kind

_ACTIONS: tuple[Action, ...] = get_args(Action)
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something is not well since step `first_step`, as was seen at `step`; `text` says so in words.

    The state after `trusted_step` steps is the last one of which nothing bad is known; the batches of steps
    `first_step` to `step` are those to leave out. `hint` says what people may do. Of losses that are bad,
    `limit` is what they are above. With `is_over` it is good news: what was found before is well again.
    """

    kind: Kind
    step: int
    first_step: int
    trusted_step: int
    text: str
    action: Action
    hint: str = ""
    limit: float | None = None
    is_over: bool = False


def badness(finding: Finding) -> tuple[int, int, int]:
    """Return what findings are ordered by: the largest is the worst, and the first to be acted on."""
    return _ACTIONS.index(finding.action), -_KINDS.index(finding.kind), -finding.first_step
