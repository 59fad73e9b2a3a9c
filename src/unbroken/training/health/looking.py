"""Looking at the bad step of a replay: what in it is not finite, and was not so before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unbroken.training import families
from unbroken.training.parts import Parts


class Sight:
    """Looks at a good step, to know what is usual, and at the bad one after it.

    Made where the state is good: what is not finite in it belongs there.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._usual = parts.bad_tensors()
        self._watch: Any = None

    def of_step(self, *, is_bad: bool) -> AbstractContextManager[Any]:
        """Return what is to be entered around a step."""
        if self._watch is not None:
            self._usual += self._watch.gradients
        # The good step has to be as it was: compiled code, run otherwise, gives other bits.
        values = {part.name: part.value for part in self._parts}
        self._watch = families.step_watch(values, self._usual, self._watch, runs_eagerly=is_bad)
        return nullcontext() if self._watch is None else self._watch

    @property
    def output(self) -> Any:
        """The first output of a module that was not finite in the last step, or None."""
        return None if self._watch is None else self._watch.found

    def bad_tensors(self) -> list[str]:
        """Return the names of the tensors that are not finite now, and of the gradients that were not."""
        found = [name for name in self._parts.bad_tensors() if name not in self._usual]
        gone = [] if self._watch is None else self._watch.gradients
        return [*found, *(name for name in gone if name not in found)]
