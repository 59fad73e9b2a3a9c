"""An iterable and where a pass over it stands: begun anew, gone on with, or begun after its end.

It is continued by its own state (`state_dict` of the object, or of the iterator that it gives), else by
reading again what was consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.own_state import (
    check_gives_state,
    forget_loaded,
    keeps_position,
    load_own_state,
    own_state,
)

_END = object()
_AT_ITS_END = b"end"

BY_OBJECT, BY_ITERATOR, BY_READING = "its state_dict", "the state_dict of its iterator", "reading again"


class Stream:
    """One iterable in one process.

    stream.begin()
    item = next(stream)
    position = stream.position()        # plain values; the item counts as consumed

    stream.go_on(position)              # in another process, over the same iterable built anew
    stream.begin_after(position)        # or the pass that follows the one of `position`

    `mark_generators` notes where the random generators are and returns what puts them back there.
    """

    def __init__(
        self, items: Iterable[Any], mark_generators: Callable[[], Callable[[], None]], name: str = "batches"
    ) -> None:
        check_gives_state(items)
        self._items = items
        self._mark_generators = mark_generators
        self._name = name
        self._iterator: Iterator[Any] = iter(())
        self._count = 0
        self._is_over = False
        self._by_object = keeps_position(items)
        self._is_loaded = False
        # Where the pass of another process stood that was over already when it was gone on with.
        self._ended_at: Mapping[str, Any] | None = None
        # States after the first batches: they have to differ, or they are no positions.
        self._seen: bytes | None = None
        self._looks = 2
        # The state after the first item of a pass that was gone on with: the next pass begins elsewhere.
        self._resumed_at: bytes | None = None
        self._is_resuming = False

    @property
    def continued_by(self) -> str:
        """How a resume gets to the position; known once a pass has begun."""
        if self._by_object:
            return BY_OBJECT
        return BY_ITERATOR if keeps_position(self._iterator) else BY_READING

    @property
    def count(self) -> int:
        """The items consumed in this pass."""
        return self._count

    @property
    def is_over(self) -> bool:
        """Whether this pass has met the end."""
        return self._is_over

    @property
    def may_be_left(self) -> bool:
        """Whether the next pass is known if this one is left before its end."""
        return not self._by_object or self._is_over or self._iterator is self._items

    def position(self) -> dict[str, Any]:
        """Return where this pass stands, as plain values."""
        if self._ended_at is not None:
            return dict(self._ended_at)
        iterator = self._iterator
        return {
            "count": self._count,
            "is_over": self._is_over,
            "is_own_iterator": iterator is self._items,
            "continued_by": self.continued_by,
            "object": own_state(self._items) if self._by_object else None,
            "iterator": own_state(iterator) if self.continued_by == BY_ITERATOR else None,
        }

    def begin(self) -> None:
        """Begin a pass as the iterable does."""
        ended_at, self._ended_at = self._ended_at, None
        if ended_at is not None:
            self.begin_after(ended_at)
            return
        if self._is_loaded:
            forget_loaded(self._items)
        self._start(iter(self._items))

    def go_on(self, position: Mapping[str, Any], redo: Callable[[Stream], None] | None = None) -> None:
        """Go on in a pass of another process.

        Where items have to be read again, `redo` does so, or they are read and dropped.

        Raises StateMismatchError if the iterable is continued in another way now, or has fewer items.
        """
        if position["is_over"]:
            self._start(iter(()))
            self._count, self._is_over, self._ended_at = position["count"], True, position
            return
        self._load(position)
        self._start(iter(self._items))
        self._check_way(position)
        if position["iterator"] is not None:
            load_own_state(self._iterator, position["iterator"])
        elif self._by_object and self._iterator is self._items:
            # Its __iter__ may have begun anew.
            self._load(position)
        elif not self._by_object:
            self._read_again(position["count"], redo)
        self._count = position["count"]
        self._is_resuming = self._by_object and self._count > 0

    def begin_after(self, position: Mapping[str, Any]) -> None:
        """Begin the pass that follows the one of another process that was at `position`.

        An object that was at its end may take up its state there: its next pass is the empty rest of the
        old one. That is tried.

        Raises:
            UnsupportedStateError: the pass was left early and nobody can tell whether the next one begins
                anew or where that was.
            StateMismatchError: from its end, the object does not come to its next pass.
        """
        if position["object"] is None or not self._by_object:
            self._start(iter(self._items))
            self._check_way(position)
            return
        if not position["is_over"] and not position["is_own_iterator"]:
            raise UnsupportedStateError(
                f"{self._name}: {left_early(self._items)}",
                hint="resume from a checkpoint inside a pass, and let passes end by themselves",
            )
        self._load(position)
        if position["is_over"]:
            put_generators_back = self._mark_generators()
            is_rest = next(iter(self._items), _END) is _END
            put_generators_back()
            if is_rest:
                self._check_unmoved(position)
                forget_loaded(self._items)
            else:
                self._load(position)
        self._start(iter(self._items))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            item = next(self._iterator)
        except StopIteration:
            self._is_over = True
            self._check_end()
            raise
        self._count += 1
        if self._is_resuming:
            self._is_resuming, self._resumed_at = False, _content(own_state(self._items))
        elif self._resumed_at is not None and self._count == 1:
            self._check_begins_anew()
        return item

    def check_moves(self) -> None:
        """Raise UnsupportedStateError if the object's own state stays the same while items are consumed.

        To be called after each batch; looks at the first two.
        """
        way = self.continued_by
        if not self._looks or way == BY_READING or self._is_over:
            return
        self._looks -= 1
        state = own_state(self._items if way == BY_OBJECT else self._iterator)
        seen, self._seen = self._seen, _content(state)
        if seen == self._seen:
            raise UnsupportedStateError(
                f"{self._name}: expected a position in the state_dict of {_kind(self._items)}, found the "
                "same state after two batches",
                hint="let its state_dict() say how far it is read, or leave it out: then the consumed items "
                "are read again",
            )

    def _start(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._count, self._is_over, self._seen = 0, False, None

    def _load(self, position: Mapping[str, Any]) -> None:
        if position["object"] is not None and self._by_object:
            load_own_state(self._items, position["object"])
            self._is_loaded = True

    def _check_way(self, position: Mapping[str, Any]) -> None:
        saved, found = position["continued_by"], self.continued_by
        if saved != found:
            raise StateMismatchError(
                f"{self._name}: the checkpoint continues {_kind(self._items)} by {saved}, found one that is "
                f"continued by {found}",
                hint="resume with the data that the run began with",
            )

    def _read_again(self, count: int, redo: Callable[[Stream], None] | None) -> None:
        if redo is not None:
            redo(self)
        else:
            while self._count < count and next(self, _END) is not _END:
                pass
        if self._count != count:
            raise StateMismatchError(
                f"{self._name}: expected at least {count} items, found {self._count}",
                hint="resume with the data that the run began with",
            )

    def _check_unmoved(self, position: Mapping[str, Any]) -> None:
        if _content(own_state(self._items)) != _content(position["object"]):
            raise StateMismatchError(
                f"{self._name}: {_kind(self._items)} was restored at the end of a pass, and changed its "
                "state by the empty rest of it: its next pass would be another one than in the run",
                hint="let its state at the end of a pass be that of the next one's begin",
            )

    def _check_end(self) -> None:
        if self._is_resuming:
            self._is_resuming, self._resumed_at = False, _AT_ITS_END
        elif self._count == 0 and self._resumed_at == _AT_ITS_END:
            raise self._not_anew()

    def _check_begins_anew(self) -> None:
        """Raise where a loaded state tells every pass where to begin, not only the next one."""
        resumed_at, self._resumed_at = self._resumed_at, None
        if resumed_at == _content(own_state(self._items)):
            raise self._not_anew()

    def _not_anew(self) -> StateMismatchError:
        return StateMismatchError(
            f"{self._name}: after a restored state, every pass over {_kind(self._items)} begins where "
            "the restored one did",
            hint="let load_state_dict() hold for the next pass only",
        )


def left_early(items: object) -> str:
    """Return what cannot be told after a pass over `items` was left before its end."""
    return (
        f"a pass over {_kind(items)} was left early: its state_dict does not tell whether the next pass "
        "begins anew or goes on from there"
    )


def _content(state: Mapping[str, Any]) -> bytes:
    return repr((state["json"], state["tensors"])).encode()


def _kind(items: object) -> str:
    return f"a {type(items).__name__}"
