"""The passes over the data that an observed script makes: which batches a step takes, how passes began."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from unbroken.rundir.rehearsal import Plan
from unbroken.state.handlers import ORDER_GENERATOR
from unbroken.training.observed_parts import NoLoaders
from unbroken.training.part import Part
from unbroken.training.randomness import RNG_PART, GlobalRandomness, GlobalRandomnessHandler
from unbroken.training.rehearsal_objects import FoundObjects, Taken, take_parts
from unbroken.training.rehearsal_values import PutBack, dump

# Below the values: generators as they were when the pass began that the step is in.
_BEGINNINGS = "beginnings-of-passes"


class Passes:
    """Follows the loaders' iterators."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # By the id of their iterator: a step takes the last one of each, the others were skipped.
        self._fetched: dict[int, Any] = {}
        self._iterators: dict[int, weakref.ref[Any]] = {}
        self._beginnings: weakref.WeakKeyDictionary[Any, list[Taken]] = weakref.WeakKeyDictionary()
        self._of_training: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest: list[Taken] | None = None
        self.has_loaders = False
        # Since a step took something.
        self._has_forgotten = False

    def begin(self, *, has_begun: bool, step: int) -> list[Taken] | None:
        """Return the generators as a pass begins, if they are wanted; put them back first, if that is."""
        plan = self._plan
        if plan.values is None:
            return None
        if plan.put_back and not has_begun:
            self._put_back(Path(plan.values))
        is_wanted = not plan.put_back and any(wanted >= step for wanted in plan.dump_at)
        return _generators()[1] if is_wanted else None

    def begun(self, iterator: Any, beginning: list[Taken] | None) -> None:
        """Take note of the iterator of a pass that began with those generators."""
        if beginning is not None:
            self._beginnings[iterator] = beginning

    def fetched(self, iterator: Any, batch: Any) -> None:
        self.has_loaders = True
        self._fetched[id(iterator)] = batch
        self._iterators[id(iterator)] = weakref.ref(iterator)

    def exhausted(self, iterator: Any) -> None:
        self._fetched.pop(id(iterator), None)

    def forget(self) -> None:
        """What was fetched was evaluated."""
        self._has_forgotten |= bool(self._fetched)
        self._fetched.clear()

    def is_batch_forgotten(self) -> bool:
        """Tell whether what a step that took nothing might have taken counted as evaluated; ask once."""
        forgotten, self._has_forgotten = self._has_forgotten, False
        return forgotten

    def taken(self) -> list[Any]:
        """Return the batches that a step takes, each once."""
        batches = list(self._fetched.values())
        self._has_forgotten &= not batches
        for key in self._fetched:
            iterator = self._iterators[key]()
            if iterator is not None:
                self._of_training.add(iterator)
                self._latest = self._beginnings.get(iterator)
        self._fetched.clear()
        self._iterators.clear()
        return batches

    def is_of_training(self, iterator: Any) -> bool:
        """Tell whether steps have taken batches of `iterator`."""
        return iterator in self._of_training

    def dump(self, step: int) -> None:
        """Write the generators as they were when the pass began whose batch was taken last."""
        if self._plan.values is not None and self._latest is not None:
            dump(Path(self._plan.values) / _BEGINNINGS, step, self._latest)

    def _put_back(self, values: Path) -> None:
        step = self._plan.put_back_at
        assert step is not None, "a plan that puts back says of which step"
        parts, taken, found = _generators()
        # Of what is not there yet it is said when the first step begins.
        PutBack(values / _BEGINNINGS, step, self._plan.put_back).into(parts, taken, found)


def _generators() -> tuple[list[Part], list[Taken], FoundObjects]:
    parts = [Part(RNG_PART, GlobalRandomness(), GlobalRandomnessHandler())]
    found = FoundObjects(parts, NoLoaders())
    objects = [one for one in found.take([]) if found.order(one.name) == ORDER_GENERATOR]
    return parts, take_parts(parts, inside_step=False) + objects, found
