"""Which checkpoint stays, whatever the user's policies say, so that there is one to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.checkpoint.retention import CheckpointFacts, RetentionPolicy
from unbroken.training.health.policy import Health

# So far back may lie the onset of what is found: losses are compared with those of a thousand steps.
LOOK_BACK_STEPS = 1000


@dataclass(frozen=True, slots=True)
class KeepToGoBackTo:
    """Keep the newest checkpoint of `steps` steps before the newest of all, or the oldest there is.

    And one that is to follow it: the oldest of at least half as many steps after it.
    """

    steps: int

    def keeps(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        if not checkpoints:
            return {}
        before = [one for one in checkpoints if one.step <= checkpoints[-1].step - self.steps]
        kept = before[-1] if before else checkpoints[0]
        reasons = {kept.name: f"to go back to, should the last {self.steps} steps turn out to be bad"}
        for one in [later for later in checkpoints if later.step >= kept.step + self.steps // 2][:1]:
            reasons[one.name] = f"to go back to next, after {kept.name}"
        return reasons


def with_one_to_go_back_to(
    policies: tuple[RetentionPolicy, ...], health: Health | None
) -> tuple[RetentionPolicy, ...]:
    """Return the policies of a run that may be rolled back. Without any policy all checkpoints are kept."""
    if not policies or health is None or not health.rolls_back:
        return policies
    return (*policies, KeepToGoBackTo(LOOK_BACK_STEPS))
