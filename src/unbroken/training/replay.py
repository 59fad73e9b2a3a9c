"""Batches whose position can be taken out and put into another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks import epoch_start
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.own_state import keeps_position
from unbroken.frameworks.reading_again import DrawWatch, told_of_reading
from unbroken.frameworks.stream import BY_READING, Stream, left_early
from unbroken.rundir.tell import tell
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


class ResumableIterable:
    """Any iterable that begins anew each time, or that has a `state_dict` of its own.

    One with a state is continued by it. Of any other a resume reads the consumed items again, which is
    exact if the items depend on nothing but the iterable, the generators it holds and those of the process.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, Iterator) and not keeps_position(items):
            raise UnsupportedStateError(
                f"batches: cannot go back in a {type(items).__name__}, which can be read once only",
                hint="pass a DataLoader, a list, or an object whose __iter__ starts anew, or give it "
                "state_dict() and load_state_dict()",
            )
        self._items = items
        self._held = HeldGenerators({"items": items})
        self._stream = Stream(items, partial(epoch_start.marked, self._held))
        self._start: dict[str, Any] = {}
        # The pass that is open, by an object of its own.
        self._open: object = None
        self._restored: dict[str, Any] | None = None
        self._is_told = isinstance(items, Sequence)
        self._is_left_told = False
        self._watch: DrawWatch | None = None
        # Random states to start a pass with that was gone on with and starts with its first item.
        self._late: dict[str, Any] | None = None
        self._was_late: bool | None = False

    def state(self) -> dict[str, Any]:
        if self._restored is not None:
            return {**self._restored, "generators": self._held.capture()}
        self._say_if_left()
        return {
            "consumed": self._stream.count,
            "is_open": self._open is not None,
            "start": self._start,
            "generators": self._held.capture(),
            "stream": self._stream.position(),
            "starts_late": self._starts_late(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held.restore(state["generators"])
        self._start, self._restored = state["start"], state

    def generators(self) -> list[object]:
        return self._held.objects()

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        restored = self._restored
        if after_replay is not None:
            # First: the iterable may be a part as well, and is put to its position after that, once.
            after_replay()
        if inside_epoch and restored is not None:
            if not restored["is_open"]:
                # For the pass that follows.
                return iter(())
            self._go_on(restored)
        else:
            self._begin(restored)
        self._restored, self._open = None, object()
        return self._deliver(self._open)

    def _begin(self, restored: dict[str, Any] | None) -> None:
        self._start = epoch_start.snapshot(self._held)
        if restored is None:
            self._stream.begin()
        else:
            self._stream.begin_after(restored["stream"])
        if not self._is_told and self._stream.continued_by == BY_READING:
            tell(told_of_reading(self._items))
        self._is_told = True
        # Training draws from the generators of the process, too.
        is_read_again = self._stream.continued_by == BY_READING
        # What an earlier pass has told holds for this one.
        known = self._watch.items_draw if self._watch is not None else False if self._was_late else None
        self._watch = DrawWatch(self._items, is_read_again=is_read_again, items_draw=known)
        self._late = None

    def _starts_late(self) -> bool | None:
        """Tell whether the first item draws what belongs to the start of a pass; None if nobody knows."""
        if self._watch is None or not self._watch.start_draws:
            return self._watch is None and self._was_late
        return None if self._watch.items_draw is None else not self._watch.items_draw

    def _go_on(self, restored: dict[str, Any]) -> None:
        now = {**epoch_start.snapshot(self._held), "generators": restored["generators"]}
        epoch_start.apply(self._held, self._start)
        self._stream.go_on(restored["stream"])
        self._was_late = restored["starts_late"]
        is_anew = self._stream.continued_by != BY_READING
        self._late = epoch_start.snapshot(self._held) if is_anew and self._was_late else None
        if is_anew and self._was_late is None:
            tell(
                f"batches: {type(self._items).__name__} drew random numbers with its first item. If they "
                "belong to the start of a pass, they are drawn once more now, and training draws others "
                "than it would have"
            )
        epoch_start.apply(self._held, now)

    def _deliver(self, this: object) -> Iterator[Any]:
        try:
            while True:
                if self._open is not this:
                    raise UsageError(
                        "batches: expected one pass at a time over an iterable, found an item asked of an "
                        "earlier one",
                        hint="pass a second object to read it twice at once",
                    )
                self._before_item()
                try:
                    item = self._next()
                except StopIteration:
                    return
                self._after_item()
                # While it waits, this frame must not keep the batch alive.
                batch = [item]
                del item
                yield batch.pop()
        finally:
            if self._open is this:
                self._open = None

    def _say_if_left(self) -> None:
        if self._open is None and not self._stream.may_be_left and not self._is_left_told:
            self._is_left_told = True
            tell(f"batches: {left_early(self._items)}; no resume from this position is possible")

    def _next(self) -> Any:
        late, self._late = self._late, None
        if late is None:
            return next(self._stream)
        # A generator function starts with its first item: what that draws was drawn before the checkpoint.
        now = epoch_start.snapshot(self._held)
        epoch_start.apply(self._held, late)
        try:
            return next(self._stream)
        finally:
            epoch_start.apply(self._held, now)

    def _before_item(self) -> None:
        if self._watch is not None:
            self._watch.before()

    def _after_item(self) -> None:
        if self._watch is not None:
            self._watch.after()
        self._stream.check_moves()


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
    return ResumableIterable(loader)


def carries_state(state: dict[str, Any]) -> bool:
    """Tell whether a loader's state matters between two passes: generators, workers, a state of its own."""
    return bool(state.get("generators")) or state.get("workers_start") is not None or _has_own(state)


def _has_own(state: dict[str, Any]) -> bool:
    streams = [state.get("stream"), *(of.get("stream") for of in state.get("workers", {}).values())]
    return any(stream is not None and stream["object"] is not None for stream in streams)
