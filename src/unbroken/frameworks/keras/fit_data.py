"""What model.fit reads, with a position: batches by number, or a stream that goes on from epoch to epoch.

An epoch of fit is a pass over all of the data, or `steps_per_epoch` batches from where the one before ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.keras.kept_batches import batch_as_kept, kept_batch
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng


@contextmanager
def _process_generators_kept() -> Iterator[None]:
    now = capture_global_rng()
    try:
        yield
    finally:
        restore_present_rng(now)


class FitData(ABC):
    """The batches of a fit. `looks` is what tells the data from other data, as plain values."""

    def __init__(self, looks: dict[str, Any], steps_per_epoch: int | None) -> None:
        self.looks = {**looks, "steps_per_epoch": steps_per_epoch}
        self.steps_per_epoch = steps_per_epoch
        self._in_epoch = 0

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch and return its batches."""
        self.begin_epoch()
        return self.rest_of_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        self._in_epoch = 0
        if self.steps_per_epoch is None:
            self.begin_anew()
        else:
            self.go_on()

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the batches of this epoch that were not handed out yet."""
        while self.steps_per_epoch is None or self._in_epoch < self.steps_per_epoch:
            try:
                batch = self.next_batch()
            except StopIteration:
                return
            self._in_epoch += 1
            yield batch

    def position(self) -> dict[str, Any]:
        """Return where it stands, as plain values."""
        return {"in_epoch": self._in_epoch, **self.place()}

    def go_to(self, position: dict[str, Any]) -> None:
        """Go to a position, in this process or another."""
        self._in_epoch = position["in_epoch"]
        self.go_to_place(position)

    @abstractmethod
    def begin_anew(self) -> None:
        """Begin a pass over all of the data."""

    @abstractmethod
    def go_on(self) -> None:
        """Begin an epoch that goes on where the one before ended."""

    @abstractmethod
    def next_batch(self) -> Any:
        """Return the next batch; raise StopIteration if there is none in this pass."""

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Return where the data stand, as plain values."""

    @abstractmethod
    def go_to_place(self, place: dict[str, Any]) -> None:
        """Go to a place."""


class NumberedBatches(FitData):
    """Batches that can be had by number, `count` of them in a pass, or without end.

    `order` gives what says, of a place in a pass, what `read` has to be asked for. A seed and the number of
    the pass decide it, so that it need not be kept.
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        order: Callable[[np.random.Generator], Any],
        *,
        count: int | None,
        looks: dict[str, Any],
        steps_per_epoch: int | None,
    ) -> None:
        super().__init__(looks, steps_per_epoch)
        self._read = read
        self._order = order
        self._count = count
        self._seed: int | None = None
        self._pass, self._at = -1, 0
        self._ordered: Any = None

    def begin_anew(self) -> None:
        self._go(self._pass + 1, 0)

    def go_on(self) -> None:
        if self._pass < 0 or self._at == self._count:
            self.begin_anew()

    def next_batch(self) -> Any:
        if self._at == self._count:
            raise StopIteration
        batch = self._read(self._ordered(self._at))
        self._at += 1
        return batch

    def place(self) -> dict[str, Any]:
        return {"seed": self._seed, "pass": self._pass, "at": self._at}

    def go_to_place(self, place: dict[str, Any]) -> None:
        self._seed = place["seed"]
        if self._seed is not None:
            self._go(place["pass"], place["at"])

    def _go(self, number: int, at: int) -> None:
        if self._seed is None:
            # From the generator of the process, so that the seed of the script decides.
            self._seed = int(np.random.randint(2**31))
        self._pass, self._at = number, at
        self._ordered = self._order(np.random.default_rng((self._seed, max(number, 0))))


class OneStream(FitData):
    """A Python generator: it cannot go back, and another process reads again what was consumed of it.

    `first` are batches that were taken of it before the fit began.
    """

    def __init__(
        self, first: Sequence[Any], items: Iterator[Any], looks: dict[str, Any], steps_per_epoch: int | None
    ) -> None:
        super().__init__(looks, steps_per_epoch)
        self._first = list(first)
        self._items = items
        self._consumed = 0
        self._began_with: dict[str, Any] | None = None

    def begin_anew(self) -> None:
        self.go_on()

    def go_on(self) -> None:
        self._began_with = self._began_with or capture_global_rng()

    def next_batch(self) -> Any:
        batch = self._first[self._consumed] if self._consumed < len(self._first) else next(self._items)
        self._consumed += 1
        return batch

    def place(self) -> dict[str, Any]:
        # What was drawn for them was drawn before anybody knew of a fit: another process draws otherwise.
        ahead = [kept_batch(batch) for batch in self._first[self._consumed :]]
        return {"consumed": self._consumed, "began_with": self._began_with, "ahead": ahead}

    def go_to_place(self, place: dict[str, Any]) -> None:
        consumed = place["consumed"]
        if self._consumed > consumed:
            raise UnsupportedStateError(
                f"fit: a generator cannot go back from batch {self._consumed} to batch {consumed}",
                hint="start the script again: it goes on from the checkpoint; or give fit a "
                "keras.utils.PyDataset or a tf.data.Dataset",
            )
        self._began_with = place["began_with"]
        for at, kept in enumerate(place["ahead"], start=consumed):
            self._first[at] = batch_as_kept(self._first[at], kept)
        with _process_generators_kept():
            # What the generator draws it drew before: from the same states.
            if self._began_with is not None and not self._consumed:
                restore_present_rng(self._began_with)
            self._read_again(consumed)

    def _read_again(self, consumed: int) -> None:
        try:
            while self._consumed < consumed:
                self.next_batch()
        except StopIteration:
            raise StateMismatchError(
                f"fit: expected a generator of at least {consumed} batches, found {self._consumed}",
                hint="resume with the data that the run began with",
            ) from None


class Continued(FitData):
    """Anything that is resumable by itself, as `made` makes it, and goes on from epoch to epoch."""

    def __init__(self, make: Callable[[], Any], looks: dict[str, Any], steps_per_epoch: int | None) -> None:
        super().__init__(looks, steps_per_epoch)
        self._make = make
        self._batches = make()
        self._iterator: Iterator[Any] | None = None

    def begin_anew(self) -> None:
        self._iterator = self._batches.iterate()

    def go_on(self) -> None:
        if self._iterator is None:
            self.begin_anew()

    def next_batch(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    def place(self) -> dict[str, Any]:
        return {"is_open": self._iterator is not None, "batches": self._batches.state()}

    def go_to_place(self, place: dict[str, Any]) -> None:
        self._batches = self._make()
        with _process_generators_kept():
            self._batches.restore(place["batches"])
            self._iterator = self._batches.iterate(inside_epoch=True) if place["is_open"] else None


class Ticks(FitData):
    """Says when an evaluation goes on: it has no data, and ends when it is told so."""

    def __init__(self) -> None:
        super().__init__({"dataset": "validation"}, None)
        self.is_over = False

    def begin_anew(self) -> None:
        self.is_over = False

    def go_on(self) -> None:
        self.begin_anew()

    def next_batch(self) -> Any:
        if self.is_over:
            raise StopIteration

    def place(self) -> dict[str, Any]:
        return {}

    def go_to_place(self, place: dict[str, Any]) -> None:
        pass


class FitBatches:
    """`FitData` as the run wants the batches of a loader; see `ResumableBatches` there."""

    def __init__(self, data: FitData) -> None:
        self._data = data

    def state(self) -> dict[str, Any]:
        return {"generators": {}, "fingerprint": self._data.looks, "position": self._data.position()}

    def restore(self, state: dict[str, Any]) -> None:
        saved, found = state["fingerprint"], self._data.looks
        changed = [
            f"{name}: {found.get(name)!r}, the checkpoint has {saved.get(name)!r}"
            for name in sorted(saved.keys() | found.keys())
            if saved.get(name) != found.get(name)
        ]
        if changed:
            raise StateMismatchError(
                f"fit: expected the data that the run began with, found others: {'; '.join(changed)}",
                hint="call fit with the same data and arguments, or start a new run directory",
            )
        self._data.go_to(state["position"])

    def generators(self) -> list[object]:
        return []

    def samples(self, back: int) -> list[Any] | None:
        return None

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        if after_replay is not None:
            after_replay()
        if not inside_epoch:
            self._data.begin_epoch()
        return self._data.rest_of_epoch()
