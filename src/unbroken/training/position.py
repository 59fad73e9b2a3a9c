"""Where training stands in its data: the epoch, and for each loader what was consumed of it.

The body of an epoch is run again when a run resumes inside it, so passes over loaders come in the
same order as before. The position therefore keeps that order: passes that were over yield nothing the
second time, and those that were open yield the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.generators import generator_state, set_generator_state
from unbroken.training.parts import Parts
from unbroken.training.replay import ResumableBatches, carries_state, resumable


@dataclass(slots=True)
class _Slot:
    """A loader with a place in the position; `loader` is None until this process has met it.

    `is_rebuilt`: the script makes a new loader each epoch, so that nothing is carried over.
    """

    name: str | None = None
    loader: object = None
    batches: ResumableBatches | None = None
    restored: dict[str, Any] | None = None
    is_rebuilt: bool = False

    def bind(self, loader: object) -> ResumableBatches:
        if self.batches is None or self.loader is not loader:
            self.loader, self.batches = loader, resumable(loader)
        return self.batches

    def state(self) -> dict[str, Any]:
        kept = self.restored if self.batches is None or self.restored is not None else self.batches.state()
        return {"name": self.name, "is_rebuilt": self.is_rebuilt, "state": kept}


class _Pass:
    """One pass over a loader, as the iterator that the user's loop holds.

    `at_boundary` is called whenever the loop asks for the next batch: all of its body is done then.
    `on_batch` is called with this pass when it hands out a batch. `has_steps` once its body took one.
    """

    def __init__(
        self,
        slot: _Slot,
        batches: Iterator[Any],
        at_boundary: Callable[[], None],
        on_batch: Callable[[_Pass], None],
        *,
        is_inner: bool,
    ) -> None:
        self.slot = slot
        self.is_inner = is_inner
        self.delivered = 0
        self.is_over = False
        self.has_steps = False
        self._is_left = False
        self._batches = batches
        self._at_boundary = at_boundary
        self._on_batch = on_batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_left:
            raise UnsupportedStateError(
                "batches: a loop over batches that began in an earlier epoch, or before the first, goes on",
                hint="begin and end every loop over run.batches inside the body of the epoch",
            )
        if not self.is_inner:
            self._at_boundary()
        try:
            batch = next(self._batches)
        except BaseException:
            self.is_over = True
            raise
        self.delivered += 1
        if not self.is_inner:
            self._on_batch(self)
        return batch

    def leave(self) -> None:
        """End this pass early, though the script still holds it: its epoch is over."""
        self.is_over = self._is_left = True
        if isinstance(self._batches, Generator):
            self._batches.close()


class Batches:
    """The batches of a loader, for one `for` loop or for several: each begins a pass."""

    def __init__(self, begin_pass: Callable[[], Iterator[Any]], loader: object) -> None:
        self._begin_pass = begin_pass
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._begin_pass()

    def __len__(self) -> int:
        """The length of a whole pass, where the loader knows it."""
        return len(self._loader)  # type: ignore[arg-type]


class Position:
    """The epoch and the passes. `inside_epoch` is True from the begin of an epoch's body to its end.

    What the script did since it entered the run, such as the part of an epoch's body before its batches,
    was done already: when a pass goes on, all `parts` are put to the checkpoint once more. `at_boundary`
    is called between two batches of a loop that may take steps. `begins_inside_step` is True after a
    restore of gradients that were gathered for a step, until that step is complete. `watch`, if it is set,
    gets the batches of each pass, the identity of its loader's place and whether it is nested in another,
    and returns what hands them out.
    """

    def __init__(self, parts: Parts, at_boundary: Callable[[], None]) -> None:
        self.epoch = 0
        self.inside_epoch = False
        self._parts = parts
        self._at_boundary = at_boundary
        self._slots: list[_Slot] = []
        self._passes: list[int] = []
        self._passes_before: list[int] = []
        # References without ownership: a pass that the user's loop has dropped is not open any more.
        self._begun: list[weakref.ref[_Pass]] = []
        self._script: list[int] = []
        self._script_open: frozenset[int] = frozenset()
        self.begins_inside_step = False
        self.watch: Callable[[Iterator[Any], int, bool], Iterator[Any]] | None = None
        # Set by the first batch since the last step: whether gradients are being gathered by now.
        self._is_gathering: Callable[[], bool] | None = None

    def state(self) -> list[dict[str, Any]]:
        """Return the loaders' positions as plain values."""
        return [slot.state() for slot in self._slots]

    def passes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the passes begun in this epoch and the loaders with an open one, as indices of `state`.

        Passes of the script that are still to be played count: they were begun before the checkpoint.
        """
        still_open = {self._slots.index(found.slot) for found in self._open() if found.slot in self._slots}
        waiting = self._script_open.intersection(self._script)
        return (*self._passes, *self._script), tuple(sorted(still_open | waiting))

    def generators(self) -> list[object]:
        """Return the random generators that the loaders hold."""
        return [
            generator
            for slot in self._slots
            if slot.batches is not None
            for generator in slot.batches.generators()
        ]

    @property
    def is_in_pass(self) -> bool:
        """Whether the script stands in the body of a loop over batches."""
        return any(found.delivered for found in self._open())

    def note_step(self) -> None:
        """Note that a step is complete: what was gathered for it has been used."""
        self.begins_inside_step, self._is_gathering = False, None
        for found in self._open():
            found.has_steps = True

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

    def _note_batch(self, found: _Pass) -> None:
        if self._is_gathering is None:
            self._is_gathering = (lambda: True) if found.has_steps else self._parts.mark_gradients()

    def restore(
        self,
        epoch: int,
        inside_epoch: bool,
        loaders: list[dict[str, Any]],
        passes: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        """Take over the position of a checkpoint."""
        self.epoch, self.inside_epoch = epoch, inside_epoch
        self._slots = [
            _Slot(name=kept["name"], restored=kept["state"], is_rebuilt=kept["is_rebuilt"])
            for kept in loaders
        ]
        self._script, self._script_open = list(passes[0]), frozenset(passes[1])

    def begin_epoch(self, epoch: int) -> None:
        """Enter the body of `epoch`."""
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
        """Raise where no position could be continued: inside a nested loop, or off the script."""
        self._check_played()
        if any(found.is_inner for found in self._open()):
            raise UnsupportedStateError(
                "run.step: a step inside a loop over run.batches that is nested in another one",
                hint="iterate the inner loader itself; only the loop that takes steps needs run.batches",
            )

    def begin_pass(self, loader: object, name: str | None) -> Iterator[Any]:
        """Return the batches of `loader` that training has not consumed yet."""
        if self.is_in_pass:
            return self._begin_inner(loader, name)
        if self._script:
            return self._play(loader)
        index = self._find(loader, name)
        self._passes.append(index)
        return self._begin(self._slots[index], loader, is_inner=False)

    def _begin_inner(self, loader: object, name: str | None) -> Iterator[Any]:
        """Begin a pass in the body of another: not part of the script, since nothing leads to it again."""
        known = any(slot.loader is loader for slot in self._slots)
        slot = _Slot(name=name)
        if known or carries_state(slot.bind(loader).state()):
            slot = self._slots[self._find(loader, name)]
        return self._begin(slot, loader, is_inner=True)

    def _begin(self, slot: _Slot, loader: object, *, is_inner: bool) -> Iterator[Any]:
        batches = slot.bind(loader)
        if slot.restored is not None:
            self._restore_between(slot, batches)
        return self._started(slot, self._watched(slot, batches.iterate(), is_inner), is_inner=is_inner)

    def _play(self, loader: object) -> Iterator[Any]:
        """Begin the next pass of the script: one that was begun before the checkpoint already."""
        index = self._script.pop(0)
        slot = self._slots[index]
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

    def _watched(self, slot: _Slot, batches: Iterator[Any], is_inner: bool) -> Iterator[Any]:
        return batches if self.watch is None else self.watch(batches, id(slot), is_inner)

    def _started(self, slot: _Slot, batches: Iterator[Any], *, is_inner: bool) -> Iterator[Any]:
        found = _Pass(slot, batches, self._at_boundary, self._note_batch, is_inner=is_inner)
        self._begun = [*(ref for ref in self._begun if ref() is not None), weakref.ref(found)]
        return found

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

    def _open(self) -> list[_Pass]:
        passes = [found for ref in self._begun if (found := ref()) is not None]
        return [found for found in passes if not found.is_over]

    def _find(self, loader: object, name: str | None) -> int:
        """Return the place of a loader that begins a new pass; it gets a new one if it has none."""
        for index, slot in enumerate(self._slots):
            if slot.loader is loader:
                slot.is_rebuilt = False
                return index
        unmet = [index for index, slot in enumerate(self._slots) if slot.loader is None and slot.name == name]
        if unmet:
            return self._first_of(unmet)
        replaced = self._replaced(name)
        if replaced is not None:
            self._slots[replaced].is_rebuilt = True
            return replaced
        self._slots.append(_Slot(name=name))
        return len(self._slots) - 1

    def _first_of(self, unmet: list[int]) -> int:
        """Choose among loaders of the checkpoint that this process has not met yet."""
        telling = [index for index in unmet if carries_state(self._slots[index].restored or {})]
        if telling and len(unmet) > 1:
            raise UnsupportedStateError(
                f"batches: cannot tell which of {len(unmet)} loaders of the checkpoint this one is",
                hint="name them: run.batches(loader, name='warm-up')",
            )
        return unmet[0]

    def _replaced(self, name: str | None) -> int | None:
        """Return the place of the loader that stood here in the epoch before and was not met in this one."""
        here = len(self._passes)
        if here >= len(self._passes_before):
            return None
        index = self._passes_before[here]
        return index if index not in self._passes and self._slots[index].name == name else None

    def _restore_between(self, slot: _Slot, batches: ResumableBatches) -> None:
        """Restore a loader whose next pass is a new one."""
        state, slot.restored = slot.restored, None
        if slot.is_rebuilt or state is None:
            # It begins as the script built it.
            return
        others = [other.batches for other in self._slots if other is not slot and other.batches is not None]
        in_use = [generator for other in others for generator in other.generators()]
        in_use += self._parts.generators()
        # They have moved on since they were restored themselves.
        states = [generator_state(generator) for generator in in_use]
        batches.restore(state)
        for generator, kept in zip(in_use, states, strict=True):
            set_generator_state(generator, kept)
