"""What the watch over training has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from unbroken.training.health.policy import Action

# non-finite: a loss or a gradient norm that is NaN or infinite.
# spike: a loss far above those before it.       divergence: losses that have risen over a window.
# plateau: losses that are exactly equal.        zero-rate: learning rates at zero with steps left.
Kind: TypeAlias = Literal["non-finite", "spike", "divergence", "plateau", "zero-rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something is not well since step `first_step`, as was seen at `step`; `text` says so in words.

    The state after `trusted_step` steps is the last one of which nothing bad is known; the batches of steps
    `first_step` to `step` are those to leave out.
    """

    kind: Kind
    step: int
    first_step: int
    trusted_step: int
    text: str
    action: Action
