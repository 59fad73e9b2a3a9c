"""Where training stands in its data: the epoch, and for each loader what was consumed of it.

The body of an epoch is run again when a run resumes inside it, so passes over loaders come in the
same order as before. The position therefore keeps that order: passes that were over yield nothing the
second time, and those that were open yield the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from unbroken.checkpoint.manifest import Position as SavedPosition
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.places import Inventory, unmoved
from unbroken.frameworks.rng import capture_global_rng
from unbroken.rundir.rollbacks import Window
from unbroken.rundir.tell import tell
from unbroken.training.consumption import Consumption
from unbroken.training.loader_places import LoaderPlaces
from unbroken.training.parts import Parts
from unbroken.training.passes import Loop, Pass
from unbroken.training.replay import (
    MADE_FOR_EACH_EVALUATION,
    MADE_IN_EACH_EPOCH,
    Randomness,
    ResumableBatches,
    Slot,
    carries_state,
    check_randomness,
    held_by,
)


class Position:
    """The epoch and the passes. `inside_epoch` is True from the begin of an epoch's body to its end.

    What the script did since it entered the run, such as the part of an epoch's body before its batches,
    was done already: when a pass goes on, all `parts` are put to the checkpoint once more. `loop` is set
    before the first pass, and told of each. `begins_inside_step` is True after a
    restore of gradients that were gathered for a step, until that step is complete. `watch`, if it is set,
    gets the batches of each pass, the identity of its loader's place and whether it is nested in another,
    and returns what hands them out. `windows` are the batches that this run leaves out.
    """

    def __init__(self, parts: Parts) -> None:
        self.epoch = 0
        self.inside_epoch = False
        self._parts = parts
        self.loop: Loop | None = None
        self._slots: list[Slot] = []
        # Those that were begun inside others since somebody looked at them.
        self._nested: list[Slot] = []
        self._passes: list[int] = []
        self._passes_before: list[int] = []
        # References without ownership: a pass that the user's loop has dropped is not open any more.
        self._begun: list[weakref.ref[Pass]] = []
        self._script: list[int] = []
        self._script_open: frozenset[int] = frozenset()
        # What there was before the first epoch of this process, as long as that is asked for.
        self._built_before: Inventory | None = None
        # The random states that entering a run that goes on has left.
        self._entered_with: dict[str, object] | None = None
        self.begins_inside_step = self._takes_steps = self.is_replayed = False
        self.watch: Callable[[Iterator[Any], int, bool], Iterator[Any]] | None = None
        self.windows: tuple[Window, ...] = ()
        self.consumption = Consumption()
        # Set by the first batch since the last step: whether gradients are being gathered by now.
        self._is_gathering: Callable[[], bool] | None = None

    def state(self) -> list[dict[str, Any]]:
        """Return the loaders' positions as plain values."""
        return [slot.state() for slot in self._with_nested(None)]

    def passes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the passes begun in this epoch and the loaders with an open one, as indices of `state`.

        Passes of the script that are still to be played count: they were begun before the checkpoint.
        """
        still_open = {self._slots.index(found.slot) for found in self._open() if found.slot in self._slots}
        waiting = self._script_open.intersection(self._script)
        return (*self._passes, *self._script), tuple(sorted(still_open | waiting))

    def generators(self, *, without: Slot | None = None) -> list[object]:
        """Return the random generators that the loaders hold, those of one left out."""
        found = [slot.batches for slot in self._slots if slot is not without and slot.batches is not None]
        return [generator for batches in found for generator in batches.generators()]

    @property
    def is_in_pass(self) -> bool:
        """Whether the script stands in the body of a loop over batches."""
        return any(found.delivered for found in self._open())

    def note_step(self) -> None:
        """Note that a step is complete: what was gathered for it has been used."""
        self.begins_inside_step, self._is_gathering = False, None
        for found in self._open():
            found.note_step()
            found.slot.takes_steps = self._takes_steps = True

    def note_counted(self, step: int) -> None:
        """Note that the step of this number was counted, whole or a part of one."""
        self.consumption.note_step(step, [found.place for found in self._open() if found.place is not None])

    def note_part_of_a_step(self) -> None:
        """Note that the script counts a step in which no optimizer has moved: more of it is to come."""
        self._is_gathering = lambda: True

    def is_inside_step(self) -> bool:
        """Tell whether gradients are being gathered for a step that is not complete.

        So it is where batches came after a step in one pass, and where gradients changed since a pass
        without a step began; batches of an evaluation change none.
        """
        is_gathering = self._is_gathering
        return self.begins_inside_step or (is_gathering is not None and is_gathering())

    def note_batch(self, found: Pass) -> None:
        """Note that a pass has handed out a batch."""
        if found.place is not None:
            self.consumption.note_batch(found.place, found.slot.number - 1)
        if self._is_gathering is None:
            self._is_gathering = (lambda: True) if found.steps else self._parts.mark_gradients()

    def trains(self, found: Pass) -> bool:
        """Tell whether a pass is one that takes steps, as far as is known; another one evaluates."""
        return not found.is_inner and (found.slot.takes_steps or not self._takes_steps)

    def restore(self, saved: SavedPosition, loaders: list[dict[str, Any]]) -> None:
        """Take over the position of a checkpoint, with the decoded state of its `loaders`."""
        self.epoch, self.inside_epoch = saved.epoch, saved.inside_epoch
        self._slots = [
            Slot(
                name=kept["name"],
                randomness="keyed" if "keyed" in (kept["state"] or ()) else "capture",
                restored=kept["state"],
                is_rebuilt=kept["is_rebuilt"],
                # Checkpoints of earlier releases do not say.
                epoch=kept.get("epoch"),
                outlives=kept.get("outlives", ()),
                number=_number(kept),
            )
            for kept in loaders
        ]
        self._script, self._script_open = list(saved.passes), frozenset(saved.open)
        self.consumption.restore(saved.steps)
        self._entered_with = capture_global_rng()

    def lies_in(self, found: Pass, saved: SavedPosition, loaders: list[dict[str, Any]]) -> bool:
        """Tell whether a checkpoint's position lies in the pass `found`, and nothing else has moved since.

        Then that pass can go on from there in this process: none of its loader's plain attributes, such as
        a count that its sampler keeps, has moved in it, and all other loaders are as they were.
        """
        passes, still_open = self.passes()
        here = (self.epoch, self.inside_epoch, passes, still_open)
        slots = self._with_nested(None)
        if self._script or self._open() != [found] or found.place is None or len(slots) != len(loaders):
            return False
        others = [(slot, kept) for slot, kept in zip(slots, loaders, strict=True) if slot is not found.slot]
        attributes = (found.slot.state()["state"] or {}).get("attributes", {})
        return (
            here == (saved.epoch, saved.inside_epoch, saved.passes, saved.open)
            and attributes.get("before") == attributes.get("now")
            and all(slot.state() == kept for slot, kept in others)
        )

    def go_back(self, found: Pass, saved: SavedPosition, loaders: list[dict[str, Any]]) -> None:
        """Let the pass `found` go on from the position of a checkpoint that `lies_in` it.

        The parts are restored already; they are put to the checkpoint once more, as when a pass is resumed.
        """
        slot = found.slot
        kept = loaders[self._slots.index(slot)]

        def begin() -> Iterator[Any]:
            # Made anew, as in another process; workers of the old one end with it.
            slot.batches, slot.number = None, _number(kept)
            batches = slot.bind(slot.loader)
            batches.restore(kept["state"])
            return batches.iterate(inside_epoch=True, after_replay=self._parts.restore_again)

        found.go_on_with(begin, self.windows)
        self.consumption.restore(saved.steps)
        self._is_gathering = None

    def put_back(self) -> None:
        """Put all parts to the checkpoint once more, as the first epoch of this process begins."""
        self._tell_of_draws()
        self._parts.restore_again()

    def _tell_of_draws(self) -> None:
        """Say once if the script has moved the random generators since it entered a run that goes on."""
        left, self._entered_with = self._entered_with or {}, None
        now = capture_global_rng()
        moved = [library for library, state in left.items() if now[library] != state]
        if moved:
            tell(
                f"since the run was entered the script has seeded, or drawn from, the random generators of "
                f"{', '.join(moved)}: they are put back to where the checkpoint has them"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Enter the body of `epoch`."""
        is_in_doubt = any(slot.is_in_doubt for slot in self._slots)
        self._built_before = (self._built_before or Inventory.of_now()) if is_in_doubt else None
        self._leave_all()
        if not (self.inside_epoch and epoch == self.epoch):
            self._script, self._script_open = [], frozenset()
        self.epoch, self.inside_epoch = epoch, True

    def end_epoch(self) -> None:
        """Leave the body of the epoch: the next epoch is the position now."""
        self._check_played()
        self._leave_all()
        self._passes_before, self._passes = self._passes, []
        self.epoch += 1
        self.inside_epoch = False

    def check_whole(self) -> None:
        """Raise where no position could be continued: in a nested loop or a replay, or off the script."""
        self.check_not_replayed("step")
        self._check_played()
        if any(found.is_inner for found in self._open()):
            raise UnsupportedStateError(
                "run.step: a step inside a loop over run.batches that is nested in another one",
                hint="iterate the inner loader itself; only the loop that takes steps needs run.batches",
            )

    def check_not_replayed(self, method: str) -> None:
        """Raise in a replay: its steps are no steps of training, which `method` of the run is for."""
        if self.is_replayed:
            raise UsageError(
                f"run.{method}: called by the function given as replay= of Health, whose steps do not count",
                hint=f"call run.{method} in the loop, after that function",
            )

    def begin_pass(
        self, loader: object, name: str | None, randomness: Randomness = "capture"
    ) -> Iterator[Any]:
        """Return the batches of `loader` that training has not consumed yet."""
        self.check_not_replayed("batches")
        check_randomness(randomness)
        if self.is_in_pass:
            return self._begin_inner(loader, name, randomness)
        if self._script:
            return self._play(loader, randomness)
        index = self._places().find(loader, name, randomness)
        self._passes.append(index)
        return self._begin(self._slots[index], loader, is_inner=False)

    def _begin_inner(self, loader: object, name: str | None, randomness: Randomness) -> Iterator[Any]:
        """Begin a pass in the body of another: not part of the script, since nothing leads to it again."""
        self._slots, self._nested = self._with_nested(loader), []
        known = any(slot.loader is loader for slot in self._slots)
        slot = Slot(name=name, randomness=randomness)
        state = {} if known else slot.bind(loader).state()
        if known or carries_state(state) or self._places().kept_like(state, name):
            slot = self._slots[self._places().find(loader, name, randomness)]
        else:
            self._nested.append(slot)
        return self._begin(slot, loader, is_inner=True)

    def _with_nested(self, begins: object) -> list[Slot]:
        """Return all places, with those of nested loaders whose state has turned out to matter.

        Such a loader replaces one that looks the same and is not what `begins`: workers would pile up.
        """
        slots, outer = [*self._slots], {*self._passes, *self._passes_before, *self._script}
        for slot in self._nested:
            if not carries_state(slot.state()["state"]):
                continue
            inner = {at: of for at, of in enumerate(slots) if at not in outer and of.batches is not None}
            alike = [at for at, of in inner.items() if of.loader is not begins and of.look() == slot.look()]
            slots += [] if alike else [slot]
            for index in alike[:1]:
                # None if an evaluation of the same epoch had another one.
                slot.epoch = None if slots[index].epoch in (None, slot.epoch) else slot.epoch
                slot.is_rebuilt, slots[index] = True, slot
        return slots

    def _begin(self, slot: Slot, loader: object, *, is_inner: bool) -> Iterator[Any]:
        batches = slot.bind(loader)
        slot.number = 0
        if slot.restored is not None:
            self._restore_between(slot, batches, slot.restored)
        return self._started(slot, self._watched(slot, batches.iterate(), is_inner), is_inner=is_inner)

    def _play(self, loader: object, randomness: Randomness) -> Iterator[Any]:
        """Begin the next pass of the script: one that was begun before the checkpoint already."""
        self._tell_of_draws()
        index = self._script.pop(0)
        slot = self._slots[index]
        slot.check(randomness)
        self._passes.append(index)
        if index in self._script:
            # Over, and followed by another pass over the same loader, whose state counts.
            return iter(())
        batches = slot.bind(loader)
        assert slot.restored is not None
        batches.restore(slot.restored)
        slot.restored = None
        rest = batches.iterate(inside_epoch=True, after_replay=self._parts.restore_again)
        is_open = index in self._script_open
        return self._started(slot, self._watched(slot, rest, False) if is_open else iter(()), is_inner=False)

    def _watched(self, slot: Slot, batches: Iterator[Any], is_inner: bool) -> Iterator[Any]:
        return batches if self.watch is None else self.watch(batches, id(slot), is_inner)

    def _started(self, slot: Slot, batches: Iterator[Any], *, is_inner: bool) -> Iterator[Any]:
        slot.epoch = self.epoch
        assert self.loop is not None, "a pass begins before the run was entered"
        place = None if is_inner else (self.epoch, len(self._passes) - 1)
        windows = () if is_inner else self.windows
        found = Pass(slot, batches, self.loop, is_inner=is_inner, place=place, windows=windows)
        self._begun = [*(ref for ref in self._begun if ref() is not None), weakref.ref(found)]
        return found

    def close(self) -> None:
        """Let go of the loaders: workers that live on end with them."""
        # A collection closes the queues first, and torch then waits in vain for its workers to hear of it.
        self._slots, self._nested = [], []

    def _leave_all(self) -> None:
        for found in self._open():
            found.leave()

    def _check_played(self) -> None:
        if self._script:
            raise StateMismatchError(
                f"batches: expected {len(self._script)} more loops over run.batches, as before the "
                "checkpoint, found none",
                hint="resume with the loop that the run began with",
            )

    def _open(self) -> list[Pass]:
        passes = [found for ref in self._begun if (found := ref()) is not None]
        return [found for found in passes if not found.is_over]

    def _places(self) -> LoaderPlaces:
        return LoaderPlaces(
            slots=self._slots,
            passes=self._passes,
            passes_before=self._passes_before,
            epoch=self.epoch,
            is_nested=self.is_in_pass,
        )

    def _restore_between(self, slot: Slot, batches: ResumableBatches, state: dict[str, Any]) -> None:
        """Restore a loader whose next pass is a new one."""
        # Of a body that is done once more, it goes on whenever it was made.
        is_of_this_epoch = slot.epoch == self.epoch
        before, holders = self._built_before, slot.holders(sorted(state["generators"]))
        if before and slot.is_in_doubt and not before.has_loader(slot.loader, batches.generators()):
            slot.is_rebuilt = None if is_of_this_epoch else True
            slot.outlives = [name for name, holder in holders.items() if before.has(holder)]
            if carries_state(held_by(state, lambda name: name not in slot.outlives)):
                tell(MADE_FOR_EACH_EVALUATION if is_of_this_epoch else MADE_IN_EACH_EPOCH)
        slot.restored = None
        # They have moved on since they were restored themselves.
        in_use = self.generators(without=slot) + self._parts.generators()
        if slot.is_rebuilt and not is_of_this_epoch:
            kept = held_by(state, slot.outlives.__contains__)
            if not carries_state(kept):
                return
            # The rest begins as the script built it.
            built = {*state["generators"]} - {*slot.outlives}
            in_use += [holders[name] for name in holders.keys() & built]
            state = {**kept, "generators": state["generators"]}
        with unmoved(in_use):
            batches.restore(state)


def _number(kept: dict[str, Any]) -> int:
    """Return how many batches a loader's pass had handed out; checkpoints of earlier releases may not say."""
    state = kept["state"] or {}
    return int(kept.get("batches", state.get("batches", state.get("consumed", 0))))
