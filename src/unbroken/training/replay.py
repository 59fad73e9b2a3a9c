"""Batches whose position can be taken out and put into another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import capture_global_rng, restore_global_rng
from unbroken.training import families


class ResumableBatches(Protocol):
    """What the position needs of a loader; its framework knows how."""

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

    Exact if the items depend on nothing but the iterable, the generators it holds and those of the
    process.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, Iterator):
            raise UnsupportedStateError(
                f"batches: cannot go back in a {type(items).__name__}, which can be read once only",
                hint="pass a DataLoader, a list, or an object whose __iter__ starts anew",
            )
        self._items = items
        self._held = HeldGenerators({"items": items})
        self._consumed = 0
        self._start: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"consumed": self._consumed, "start": self._start, "generators": self._held.capture()}

    def restore(self, state: dict[str, Any]) -> None:
        self._held.restore(state["generators"])
        self._consumed, self._start, self._restored = state["consumed"], state["start"], state

    def generators(self) -> list[object]:
        return self._held.objects()

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if inside_epoch and restored is not None:
            iterator = self._replay(restored)
        else:
            self._consumed = 0
            self._start = {"global": capture_global_rng(), "generators": self._held.capture()}
            iterator = iter(self._items)
        if after_replay is not None:
            after_replay()
        return self._count(iterator)

    def _replay(self, restored: dict[str, Any]) -> Iterator[Any]:
        restore_global_rng(self._start["global"])
        self._held.restore(self._start["generators"])
        iterator = iter(self._items)
        for index in range(self._consumed):
            if next(iterator, self) is self:
                raise StateMismatchError(
                    f"batches: expected at least {self._consumed} items, found {index}",
                    hint="resume with the data that the run began with",
                )
        self._held.restore(restored["generators"])
        return iterator

    def _count(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self._consumed += 1
            yield item


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


def carries_state(state: dict[str, Any]) -> bool:
    """Tell whether a loader's state matters between two passes: generators or workers of its own."""
    return bool(state.get("generators")) or state.get("workers_start") is not None
