"""What a run does when `unbroken drill` rehearses it: nothing at all when there is no plan.

See `unbroken.rundir.rehearsal` for the plan and the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unbroken.rundir.rehearsal import Plan
from unbroken.training.save_policy import Progress
from unbroken.training.saver import Saver
from unbroken.training.whole_state import WholeState


class Rehearsal(Protocol):
    """Told by the run of what happens, in the order of these methods."""

    def about_to_begin(self) -> None:
        """The run was entered or an epoch begins: the next step may begin here, if not at a batch."""
        ...

    def counting(self) -> None:
        """One more step is about to be counted."""
        ...

    def evaluating(self) -> None:
        """Metrics of the state are recorded."""
        ...

    def at_boundary(self) -> None:
        """The state is whole, and nothing was done about it yet."""
        ...

    def past_boundary(self) -> None:
        """What was due at the boundary is done."""
        ...

    def at_end_of_body(self) -> None:
        """The body of an epoch is done."""
        ...

    def close(self) -> None:
        """The run ends."""
        ...


class NoRehearsal:
    """The run is for real."""

    def about_to_begin(self) -> None: ...
    def counting(self) -> None: ...
    def evaluating(self) -> None: ...
    def at_boundary(self) -> None: ...
    def past_boundary(self) -> None: ...
    def at_end_of_body(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AtSteps:
    """Save once each of `steps` is complete."""

    steps: tuple[int, ...]

    def is_due(self, progress: Progress) -> bool:
        return any(progress.saved_step < step <= progress.step for step in self.steps)


def rehearsal(plan: Plan | None, state: WholeState, saver: Saver) -> Rehearsal:
    """Return who follows `plan` in the run of that state."""
    if plan is None:
        return NoRehearsal()
    from unbroken.training.rehearsal_probe import Probe

    return Probe(plan, state, saver)
