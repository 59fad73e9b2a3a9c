"""Which place in the position a loader of the script has: its own, that of an earlier one, or a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import UnsupportedStateError
from unbroken.rundir.tell import tell
from unbroken.training.replay import Randomness, Slot, carries_state, data, looks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlaces:
    """The places there are; a new one is added to `slots`.

    `passes` are those that were begun in this epoch, `passes_before` those of the epoch before, as indices
    of `slots`. `is_nested` says whether the loader at hand begins in the body of a loop over batches.
    """

    slots: list[Slot]
    passes: Sequence[int]
    passes_before: Sequence[int]
    epoch: int
    is_nested: bool

    def find(self, loader: object, name: str | None, randomness: Randomness) -> int:
        """Return the place of a loader that begins a new pass; it gets a new one if it has none."""
        for index, slot in enumerate(self.slots):
            if slot.loader is loader:
                slot.check(randomness)
                if slot.epoch != self.epoch:
                    slot.is_rebuilt = False
                return index
        named = [index for index, slot in enumerate(self.slots) if slot.name == name]
        alike = [index for index in named if self.slots[index].randomness == randomness]
        if randomness == "keyed" and alike:
            return self._rebuilt_keyed(alike[0])
        unmet = [index for index in named if self.slots[index].loader is None]
        fresh = Slot(name=name, randomness=randomness)
        if not named and name is not None:
            # It may have got its name since.
            unmet = self.kept_like(fresh.bind(loader).state(), None)
        if unmet:
            fitting = [index for index in unmet if self.slots[index].randomness == randomness]
            if not fitting:
                self.slots[unmet[0]].check(randomness)
            index = self._one_of(fitting, fresh, loader)
            self.slots[index].name = name
            return index
        replaced = self._replaced_inner(alike, fresh, loader) if self.is_nested else self._replaced(alike)
        fresh.bind(loader)
        if replaced is not None:
            self.slots[replaced].replace(fresh)
            return replaced
        self._tell_if_alike(fresh.bind(loader).state(), name)
        self.slots.append(fresh)
        return len(self.slots) - 1

    def _rebuilt_keyed(self, index: int) -> int:
        """Return the place of the keyed loader of a name, which one that was built since goes on from."""
        if index in self.passes:
            raise UnsupportedStateError(
                "batches: expected one loader with keyed randomness, found a second one of the same name",
                hint="name them: run.batches(loader, randomness='keyed', name='warm-up')",
            )
        return index

    def _one_of(self, unmet: list[int], fresh: Slot, loader: object) -> int:
        """Choose among loaders of the checkpoint that this process has not met yet."""
        kept = {index: self.slots[index].restored or {} for index in unmet}
        if len(unmet) == 1 or not any(map(carries_state, kept.values())):
            return unmet[0]
        live = fresh.bind(loader).state()
        # How batches are made may have changed since.
        for told_by in (looks, data):
            same = [index for index in unmet if told_by(kept[index]) == told_by(live)]
            if len(same) == 1:
                return same[0]
        raise UnsupportedStateError(
            f"batches: cannot tell which of {len(unmet)} loaders of the checkpoint this one is",
            hint="go on from a checkpoint inside an epoch, or in a new run directory, and name them: "
            "run.batches(loader, name='warm-up')",
        )

    def kept_like(self, state: dict[str, Any], name: str | None) -> list[int]:
        """Return the loaders of the checkpoint that look like the one of `state`, and whose own matters."""
        return [
            index
            for index, slot in enumerate(self.slots)
            if slot.loader is None and slot.name == name
            if carries_state(slot.restored or {}) and looks(slot.restored or {}) == looks(state)
        ]

    def _tell_if_alike(self, state: dict[str, Any], name: str | None) -> None:
        """Say of a new loader that a resume could not tell it from another one, before that matters."""
        others = [slot.state()["state"] or {} for slot in self.slots if slot.name is None and name is None]
        if any(looks(other) == looks(state) and carries_state(other) for other in others):
            tell(
                "batches: after a resume between two epochs two loaders of the same data could not be told "
                "apart; name them: run.batches(loader, name='warm-up')"
            )

    def _replaced(self, alike: list[int]) -> int | None:
        """Return the place of the loader that stood here in the epoch before and was not met in this one."""
        if len(self.passes) >= len(self.passes_before):
            return None
        index = self.passes_before[len(self.passes)]
        return index if index not in self.passes and index in alike else None

    def _replaced_inner(self, alike: list[int], fresh: Slot, loader: object) -> int | None:
        """Return the place of a nested loader of earlier epochs in whose stead this one is."""
        found = looks(fresh.bind(loader).state())
        for index in alike:
            is_inner = index not in (*self.passes, *self.passes_before)
            slot = self.slots[index]
            if is_inner and slot.epoch != self.epoch and looks(slot.state()["state"] or {}) == found:
                return index
        return None
