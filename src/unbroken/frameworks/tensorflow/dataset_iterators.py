"""An iterator over a tf.data.Dataset, which the script keeps from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.tensorflow.cache_files import AlreadyThere, drop_later, in_the_way, shards_written
from unbroken.frameworks.tensorflow.dataset_fingerprint import check_same_pipeline, fingerprint
from unbroken.frameworks.tensorflow.iterator_state import CannotBeSaved, put, reason, state_of
from unbroken.frameworks.tensorflow.pipeline import Pipeline
from unbroken.rundir.tell import tell

_END = object()


class ResumableIterator:
    """What `iter(dataset)` gave: each pass over it goes on where the one before was left.

    There is nothing to read again from, so that one without a state is refused, before a batch is taken where
    that shows, else when the first one has come.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._handle = getattr(iterator, "_iterator", iterator)
        self._pipeline = Pipeline(self._handle._dataset)
        self._fingerprint = fingerprint(self._pipeline)
        lacks = self._pipeline.lacks()
        if lacks is not None:
            raise _refused(lacks)
        self._open: object = None
        self._count = 0
        self._is_tried = False
        self._restored: dict[str, Any] | None = None

    def samples(self, back: int) -> list[Any] | None:
        """Return None: elements have no indices."""
        return None

    def generators(self) -> list[object]:
        """Return none: it holds no generator of Python."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, as plain values."""
        if self._restored is not None:
            return self._restored
        return {
            "fingerprint": self._fingerprint,
            "consumed": self._count,
            "is_open": self._open is not None,
            "generators": {},
            "stream": {"object": self._state_now()},
            # After that: it completes one.
            "cached": shards_written(self._pipeline),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a position; raises StateMismatchError, naming all differences, for another pipeline."""
        check_same_pipeline(state["fingerprint"], self._fingerprint)
        self._restored = dict(state)

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Begin a pass, or go on in that of the restored state, and return its batches."""
        restored = self._restored
        if after_replay is not None:
            after_replay()
        if inside_epoch and restored is not None and not restored["is_open"]:
            return iter(())  # for the pass that follows
        self._say()
        goes_on = inside_epoch and restored is not None
        if restored is not None:
            drop_later(self._pipeline, restored.get("cached", {}))
            put(self._handle, restored["stream"]["object"])
        self._count = restored["consumed"] if restored is not None and goes_on else 0
        self._restored, self._open = None, object()
        return self._deliver(self._open)

    def _deliver(self, this: object) -> Iterator[Any]:
        try:
            while self._open is this:
                try:
                    batch = next(self._iterator, _END)
                except AlreadyThere:
                    raise in_the_way(self._pipeline) from None
                if batch is _END:
                    return
                self._count += 1
                if not self._is_tried:
                    self._state_now()
                    self._is_tried = True
                handed = [batch]
                del batch
                yield handed.pop()
        finally:
            if self._open is this:
                self._open = None

    def _state_now(self) -> bytes:
        # Each time anew: the script may draw from its own iterator between two batches.
        try:
            return state_of(self._handle)
        except CannotBeSaved as error:
            raise _refused(reason(error)) from None

    def _say(self) -> None:
        if not self._is_tried:
            for line in self._pipeline.hazards():
                tell(f"batches: tf.data: {line}")


def _refused(why: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"batches: cannot keep the state of this tf.data iterator: {why}",
        hint="pass the dataset itself: `for batch in run.batches(dataset)`; each pass then begins anew, and "
        "consumed batches are read again by a resume",
    )
