"""Where training stands in its data: the epoch, and for each loader what was consumed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.generators import generator_state, set_generator_state
from unbroken.frameworks.rng import capture_global_rng, restore_global_rng
from unbroken.training import families


class ResumableBatches(Protocol):
    """An iterable over batches whose position can be taken out and put into another process."""

    def state(self) -> dict[str, Any]:
        """Return the position as plain values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a position before the first `iterate`; raises StateMismatchError if it does not fit."""
        ...

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Return the batches of a pass: a new one, or with `inside_epoch` the rest of the restored one.

        What the beginning of a pass draws is drawn by the call, not at the first batch.
        """
        ...

    def generators(self) -> list[object]:
        """Return the random generators that a restore sets, the process's own ones aside."""
        ...


class ReplayedIterable:
    """Any iterable that gives its items anew each time: a resume reads the consumed ones again.

    Exact if the items depend on nothing but the iterable and the generators of the process.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        if iter(items) is items:
            raise UnsupportedStateError(
                f"batches: cannot go back in a {type(items).__name__}, which can be read once only",
                hint="pass a DataLoader, a list, or an object whose __iter__ starts anew",
            )
        self._items = items
        self._consumed = 0
        self._start: object = None
        self._restored = False

    def state(self) -> dict[str, Any]:
        return {"consumed": self._consumed, "start_rng": self._start}

    def restore(self, state: dict[str, Any]) -> None:
        self._consumed, self._start = state["consumed"], state["start_rng"]
        self._restored = True

    def generators(self) -> list[object]:
        return []

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        replay = self._consumed if inside_epoch and self._restored else 0
        self._restored = False
        if replay:
            restore_global_rng(self._start)  # type: ignore[arg-type]
        else:
            self._consumed, self._start = 0, capture_global_rng()
        iterator = iter(self._items)
        for index in range(replay):
            if next(iterator, self) is self:
                raise StateMismatchError(
                    f"batches: expected at least {replay} items, found {index}",
                    hint="resume with the data that the run began with",
                )
        if after_replay is not None:
            after_replay()
        return self._count(iterator)

    def _count(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self._consumed += 1
            yield item


class _Slot:
    """A place in the user's loop where batches are asked for; `passes` counts them in this epoch."""

    def __init__(self, loader: object, batches: ResumableBatches) -> None:
        self.loader = loader
        self.batches = batches
        self.passes = 0


class Batches:
    """The batches of a loader, for one `for` loop or for several: each begins a pass."""

    def __init__(self, position: Position, loader: object, restore_rng: Callable[[], None]) -> None:
        self._position = position
        self._loader = loader
        self._restore_rng = restore_rng

    def __iter__(self) -> Iterator[Any]:
        return self._position.begin_pass(self._loader, self._restore_rng)

    def __len__(self) -> int:
        """The length of a whole pass, where the loader knows it."""
        return len(self._loader)  # type: ignore[arg-type]


class Position:
    """The epoch and the loaders. `inside_epoch` is True from the begin of an epoch's body to its end."""

    def __init__(self) -> None:
        self.epoch = 0
        self.inside_epoch = False
        self._slots: list[_Slot] = []
        self._next_slot = 0
        self._pending: list[dict[str, Any]] = []

    def state(self) -> list[dict[str, Any]]:
        """Return the loaders' positions, one for each place in the loop, as plain values."""
        kept = [{"passes": slot.passes, "state": slot.batches.state()} for slot in self._slots]
        # A loader that this attempt has not reached yet keeps the position it was restored with.
        return kept + self._pending[len(kept) :]

    def restore(self, epoch: int, inside_epoch: bool, loaders: list[dict[str, Any]]) -> None:
        """Take over the position of a checkpoint."""
        self.epoch = epoch
        self.inside_epoch = inside_epoch
        self._pending = list(loaders)

    def begin_epoch(self, epoch: int) -> None:
        """Enter the body of `epoch`; passes counted in the epoch before are forgotten."""
        is_resumed = self.inside_epoch and epoch == self.epoch
        self.epoch, self.inside_epoch = epoch, True
        self._next_slot = 0
        if not is_resumed:
            for slot in self._slots:
                slot.passes = 0
            self._pending = [{**kept, "passes": 0} if kept else kept for kept in self._pending]

    def end_epoch(self) -> None:
        """Leave the body of the epoch: the next epoch is the position now."""
        self.epoch += 1
        self.inside_epoch = False

    def begin_pass(self, loader: object, restore_rng: Callable[[], None]) -> Iterator[Any]:
        """Return the batches of `loader` that training has not consumed yet."""
        index, resumed = self._slot(loader)
        slot = self._slots[index]
        done = resumed.get("passes", 0)
        slot.passes += 1
        if slot.passes < done:
            # A pass that was completed before the one the checkpoint stands in.
            return iter(())
        if not resumed:
            return slot.batches.iterate()
        self._pending[index] = {}
        self._restore(slot, resumed["state"])
        if done:
            return slot.batches.iterate(inside_epoch=True, after_replay=restore_rng)
        return slot.batches.iterate()

    def _restore(self, slot: _Slot, state: dict[str, Any]) -> None:
        # A generator that a loader in use shares with this one has moved on since it was restored.
        in_use = [
            generator
            for other in self._slots
            if other is not slot and other.passes
            for generator in other.batches.generators()
        ]
        states = [generator_state(generator) for generator in in_use]
        slot.batches.restore(state)
        for generator, kept in zip(in_use, states, strict=True):
            set_generator_state(generator, kept)

    def _slot(self, loader: object) -> tuple[int, dict[str, Any]]:
        """Return the place for `loader` and the position still to be restored there, if any.

        A loader keeps its place; a new one (built anew each epoch) takes the next place in the loop.
        """
        index = next((i for i, slot in enumerate(self._slots) if slot.loader is loader), self._next_slot)
        if index == len(self._slots):
            self._slots.append(_Slot(loader, resumable(loader)))
        elif self._slots[index].loader is not loader:
            passes = self._slots[index].passes
            self._slots[index] = _Slot(loader, resumable(loader))
            self._slots[index].passes = passes
        self._next_slot = index + 1
        return index, self._pending[index] if index < len(self._pending) else {}


def resumable(loader: object) -> ResumableBatches:
    """Return `loader` made resumable. Raises UnsupportedStateError for what cannot be resumed exactly."""
    found: ResumableBatches | None = families.resumable_loader(loader)
    if found is not None:
        return found
    if not isinstance(loader, Iterable):
        raise UnsupportedStateError(
            f"batches: expected a DataLoader or an iterable, found a {type(loader).__name__}",
            hint="pass the loader itself",
        )
    return ReplayedIterable(loader)
