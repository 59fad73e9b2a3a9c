"""Which batches went into which steps: what is to be left out when steps turn out to be bad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unbroken.rundir.rollbacks import Window

# Steps of one pass that take as many batches each are one stretch; so many of them are remembered.
_MOST_STRETCHES = 64
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """`steps` steps from `first_step`, each with `batches` batches of one pass, in order from `first`."""

    first_step: int
    steps: int
    epoch: int
    pass_index: int
    first: int
    batches: int

    def extended(self, step: int, window: Window) -> Stretch | None:
        """Return this stretch with `step` and its batches added, or None if they do not follow it."""
        after = (self.first_step + self.steps, self.epoch, self.pass_index)
        is_next = after == (step, window.epoch, window.pass_index)
        is_alike = (window.first, window.last - window.first + 1) == (self._end, self.batches)
        return replace(self, steps=self.steps + 1) if is_next and is_alike else None

    def window(self, first_step: int, last_step: int, *, more: int = 0) -> Window | None:
        """Return the batches of those of its steps that are from `first_step` to `last_step`.

        If it has the last one, with those of as many steps `more`.
        """
        first = max(first_step, self.first_step)
        last = min(last_step, self.first_step + self.steps - 1)
        if first > last:
            return None
        begin = self.first + (first - self.first_step) * self.batches
        steps = last + 1 - self.first_step + (more if last == last_step else 0)
        end = self.first + steps * self.batches - 1
        return Window(epoch=self.epoch, pass_index=self.pass_index, first=begin, last=end)

    @property
    def _end(self) -> int:
        return self.first + self.steps * self.batches


class Consumption:
    """Notes each batch that was handed out, and each step that they were for.

    The batches of a step are all that passes which take steps have handed out since the step before.
    """

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        # Since the last step, by pass: the first and the last batch.
        self._pending: dict[_Place, tuple[int, int]] = {}
        # The passes of this epoch and the one before that take steps.
        self._training: set[_Place] = set()

    def note_batch(self, place: _Place, number: int) -> None:
        """Note that the pass at `place`, its epoch and its index in it, has handed out a batch."""
        first, _ = self._pending.get(place, (number, number))
        self._pending[place] = (first, number)

    def note_step(self, step: int, open_passes: Iterable[_Place]) -> None:
        """Note that a step is complete, in the bodies of `open_passes`: these take steps."""
        self._training.update(open_passes)
        taken = {place: self._pending[place] for place in self._pending.keys() & self._training}
        self._pending = {}
        for (epoch, index), (first, last) in sorted(taken.items()):
            self._add(step, Window(epoch=epoch, pass_index=index, first=first, last=last))
        self._training = _recent(self._training)

    def _add(self, step: int, window: Window) -> None:
        # Side by side run a few passes at most.
        for place, stretch in enumerate(self._stretches[-4:], start=max(0, len(self._stretches) - 4)):
            longer = stretch.extended(step, window)
            if longer is not None:
                self._stretches[place] = longer
                return
        size = window.last - window.first + 1
        begun = Stretch(step, 1, window.epoch, window.pass_index, window.first, size)
        self._stretches = [*self._stretches, begun][-_MOST_STRETCHES:]

    def windows(self, first_step: int, last_step: int, *, more: int = 0) -> tuple[Window, ...]:
        """Return the batches that went into steps `first_step` to `last_step`, as far as they are known.

        With those of as many steps `more` that would follow in the same passes.
        """
        found = (stretch.window(first_step, last_step, more=more) for stretch in self._stretches)
        return merged(window for window in found if window is not None)

    def state(self) -> list[list[int]]:
        """Return what is known as plain values; a stretch without steps is what waits for the next one."""
        known = [
            [one.first_step, one.steps, one.epoch, one.pass_index, one.first, one.batches]
            for one in self._stretches
        ]
        waiting = [
            [0, 0, epoch, index, first, last - first + 1]
            for (epoch, index), (first, last) in sorted(self._pending.items())
            if (epoch, index) in self._training
        ]
        return known + waiting

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Take over what a checkpoint knows."""
        found = [Stretch(*one) for one in state]
        self._stretches = [one for one in found if one.steps]
        self._pending = {
            (one.epoch, one.pass_index): (one.first, one.first + one.batches - 1)
            for one in found
            if not one.steps
        }
        taken = {(one.epoch, one.pass_index) for one in self._stretches}
        self._training = _recent({*self._pending, *taken})


def _recent(places: set[_Place]) -> set[_Place]:
    """Return those of the newest epoch among them and of the one before."""
    newest = max(places, default=(0, 0))[0]
    return {place for place in places if place[0] >= newest - 1}


def merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Return the same batches in as few windows as there can be, in order."""
    found: list[Window] = []
    for one in sorted(windows, key=lambda one: (one.epoch, one.pass_index, one.first)):
        last = found[-1] if found else None
        if last and place_of(last) == place_of(one) and one.first <= last.last + 1:
            found[-1] = replace(last, last=max(last.last, one.last))
        else:
            found.append(one)
    return tuple(found)


def place_of(window: Window) -> _Place:
    return window.epoch, window.pass_index
