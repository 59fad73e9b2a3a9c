"""The lower learning rates after roll-backs, for the steps that each of them names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from unbroken.frameworks.family import LowerRates
from unbroken.rundir.rollbacks import LowerRate, Rollback
from unbroken.rundir.tell import tell
from unbroken.training import families


class Lowering:
    """Lowers the learning rates of the optimizers among `parts` as the roll-backs say.

    `step_count()` is how many steps are complete; an optimizer that steps then is at the next one. What was
    lowered twice, by two roll-backs that name the same step, is multiplied by both factors.
    """

    def __init__(self, parts: Mapping[str, object], step_count: Callable[[], int]) -> None:
        self._parts = parts
        self._step_count = step_count
        self._asked: tuple[LowerRate, ...] = ()
        self._rates: list[LowerRates] = []

    def follow(self, rollbacks: Sequence[Rollback]) -> None:
        """Lower the rates as these roll-backs say; called when the run begins, and after each roll-back."""
        asked = [one.lower_rate for one in rollbacks if one.lower_rate is not None]
        self._asked = tuple(one for one in asked if one.until_step > self._step_count())
        if self._asked and not self._rates:
            self._rates, unknown = families.lower_rates(self._parts, self._factor)
            if not self._rates or unknown:
                whose = f"of {', '.join(unknown)} " if unknown else ""
                tell(f"the learning rate {whose}is not lowered: only those of torch and Keras can be")
        elif not self._asked:
            self.close()

    def refresh(self) -> None:
        """Take the factors of the step that comes."""
        for rates in self._rates:
            rates.refresh()

    def close(self) -> None:
        """Lower no more."""
        for rates in self._rates:
            rates.close()
        self._rates = []

    def _factor(self) -> float:
        return factor(self._asked, self._step_count() + 1)


def factor(asked: Sequence[LowerRate], step: int) -> float:
    """Return what the learning rates of a step are multiplied by."""
    return math.prod(one.factor for one in asked if one.from_step < step <= one.until_step)
