"""A tf.data.Dataset that goes on, in another process, with the very batch it stopped at.

It is continued by the state of TensorFlow's own iterator, which holds where each stage stands and what their
buffers hold. A pipeline that calls Python, or draws from generators of TensorFlow, has no such state: of it
the consumed batches are read again, from where its shuffles and the random generators of the process stood as
the pass began. That is found out when the first batch has come, not when something is to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks import epoch_start
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.reading_again import DrawWatch
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.tensorflow.cache_files import AlreadyThere, drop_later, in_the_way, shards_written
from unbroken.frameworks.tensorflow.dataset_fingerprint import check_same_pipeline, fingerprint, seeds
from unbroken.frameworks.tensorflow.iterator_state import (
    CannotBeSaved,
    put,
    reason,
    shuffles_in,
    start_of,
    state_of,
)
from unbroken.frameworks.tensorflow.pipeline import Pipeline
from unbroken.rundir.tell import tell

_State = dict[str, Any]
_END = object()
# States that are larger than this are said: they are in each checkpoint.
_LARGE_BYTES = 2**25


class ResumableDataset:
    """A dataset whose iteration can stop after any batch and go on in another process.

    One pass at a time: beginning another ends the one before. Each pass is what `iter` of the dataset gives,
    so that `shuffle` and `cache` go on from pass to pass as they do without a run.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._pipeline = Pipeline(dataset)
        self._fingerprint = fingerprint(self._pipeline)
        self._held = HeldGenerators(self._pipeline.python_functions())
        # Why there is no state of an iterator, None as long as there is one.
        self._reads_again = self._pipeline.lacks()
        self._open: Any = None
        self._next: Any = None  # an iterator that the next pass will read
        self._count = 0
        self._marks: _State = {}  # random states as the pass began
        self._start: bytes | None = None  # where the shuffles stood as the pass began
        self._as_built: bytes | None = None
        self._taken: bytes | None = None  # the state after the newest batch
        # A state of this pass that says where all shuffles stand, and the batches that were read then.
        self._known: tuple[bytes, int] | None = None
        self._restored: _State | None = None
        self._is_tried = self._is_told = self._is_size_told = self._is_left_told = False
        self._watch: DrawWatch | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def samples(self, back: int) -> list[Any] | None:
        """Return None: elements have no indices."""
        return None

    def generators(self) -> list[object]:
        """Return the random generators that functions of the pipeline hold; a restore sets them."""
        return self._held.objects()

    def state(self) -> _State:
        """Return the position after the last batch that was handed out, as plain values."""
        if self._restored is not None:
            return {**self._restored, "generators": self._held.capture()}
        is_open = self._open is not None
        taken = self._state_now() if is_open else None
        known, behind = (None, 0) if taken is None else self._known_state(taken)
        # Of what is read again: whatever else it needs.
        begins = is_open and taken is None
        return {
            "fingerprint": self._fingerprint,
            "seeds": seeds(self._pipeline),
            "consumed": self._count,
            "is_open": is_open,
            "marks": self._marks if begins else {},
            "cached": shards_written(self._pipeline) if is_open else {},
            "generators": self._held.capture(),
            "stream": {
                "object": None if is_open else self._next_begin(),
                "next": None if taken is None else self._next_after(),
                "start": self._start if begins else None,
                "iterator": known,
                "behind": behind,
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a position; raises StateMismatchError, naming all differences, for another pipeline."""
        if state["is_open"] or state["stream"]["object"] is not None:
            check_same_pipeline(state["fingerprint"], self._fingerprint)
            self._tell_of_seeds(state["seeds"])
        self._held.restore(state["generators"])
        self._restored = dict(state)

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Begin a pass, or go on in that of the restored state, and return its batches."""
        restored = self._restored
        if after_replay is not None:
            after_replay()
        if restored is not None:
            drop_later(self._pipeline, restored.get("cached", {}) if inside_epoch else {})
        if inside_epoch and restored is not None:
            if not restored["is_open"]:
                return iter(())  # for the pass that follows
            self._say()
            self._go_on(restored)
        else:
            self._say()
            self._begin(restored)
        self._restored = None
        return self._deliver(self._open)

    def _begin(self, restored: _State | None) -> None:
        self._marks = epoch_start.snapshot(self._held)
        iterator, self._next = self._next or self._made(), None
        if restored is not None:
            stream = restored["stream"]
            if stream["object"] is not None:
                put(iterator, stream["object"])
            elif restored["is_open"]:
                iterator = self._made_after(stream)
        reads_again = bool(self._reads_again) or not self._is_tried
        # Costs nothing worth mentioning, unless a cache in memory is in it.
        begin = start_of(iterator) if reads_again or self._pipeline.draws_inside else None
        self._start = begin if reads_again else None
        self._take_up(iterator, 0, None if begin is None else (begin, 0))

    def _made_after(self, stream: Mapping[str, Any]) -> Any:
        """Return an iterator for the pass that follows one which another process has left open."""
        left, following = stream["iterator"] or stream["start"], self._made()
        if left is not None:
            put(following, left)
            for _ in range(stream["behind"]):
                next(following, None)
        following = self._made()
        if stream["next"] is not None:
            put(following, stream["next"])
        return following

    def _go_on(self, restored: _State) -> None:
        stream, known = restored["stream"], None
        iterator = self._made()
        if stream["iterator"] is not None:
            put(iterator, stream["iterator"])
            known = stream["iterator"], restored["consumed"] - stream["behind"]
            for _ in range(stream["behind"]):
                next(iterator, None)
            if stream["next"] is not None:
                self._next = self._made()
                put(self._next, stream["next"])
        else:
            self._read_again(iterator, restored)
        self._marks, self._start = restored["marks"], stream["start"]
        self._take_up(iterator, restored["consumed"], known)

    def _read_again(self, iterator: Any, restored: _State) -> None:
        count, start = restored["consumed"], restored["stream"]["start"]
        now = capture_global_rng()
        epoch_start.apply(self._held, restored["marks"])
        if start is not None:
            put(iterator, start)
        found = 0
        while found < count and next(iterator, _END) is not _END:
            found += 1
        # Those that the pipeline holds stay where reading has left them: it reads ahead, then and now.
        restore_present_rng(now)
        if found != count:
            raise StateMismatchError(
                f"batches: expected at least {count} batches in the tf.data pipeline, found {found}",
                hint="resume with the data that the run began with",
            )

    def _take_up(self, iterator: Any, count: int, known: tuple[bytes, int] | None) -> None:
        self._open, self._count, self._taken, self._known = iterator, count, None, known
        self._watch = DrawWatch(self._dataset) if self._reads_again else None

    def _deliver(self, this: Any) -> Iterator[Any]:
        try:
            while (batch := self._read(this)) is not _END:
                # While it waits, this frame must not keep the batch alive.
                handed = [batch]
                del batch
                yield handed.pop()
        except GeneratorExit:
            self._close(this)
            self._say_left()
            raise
        if self._close(this) and self._pipeline.draws_at_begin:
            # Now, and not when a state is asked for: so its order does not depend on when that is.
            self._next = self._next or self._made()

    def _read(self, this: Any) -> Any:
        if this is not self._open:
            raise UsageError(
                "batches: expected one pass at a time over a dataset, found a batch asked of an earlier one",
                hint="build a second dataset to read it twice at once",
            )
        self._taken = None
        if self._watch is not None:
            self._watch.before()
        try:
            batch = next(this, _END)
        except AlreadyThere:
            self._close(this)
            raise in_the_way(self._pipeline) from None
        except BaseException:
            self._close(this)
            raise
        if batch is _END:
            return _END
        if self._watch is not None:
            self._watch.after()
        self._count += 1
        if not self._is_tried:
            self._state_now()
            self._is_tried = True
        return batch

    def _close(self, this: Any) -> bool:
        if this is not self._open:
            return False
        self._open = self._taken = None
        return True

    def _made(self) -> Any:
        iterator = iter(self._dataset)
        if self._as_built is None:
            self._as_built = start_of(iterator)
        return iterator

    def _next_begin(self) -> bytes | None:
        """Return the begin of the next pass, None if it is that of any."""
        if not self._pipeline.lives_on:
            return None
        self._next = self._next or self._made()
        begin = start_of(self._next)
        self._say_size(begin)
        return None if begin == self._as_built else begin

    def _next_after(self) -> bytes | None:
        """Return the begin of the next pass: near its end the state of this one does not say where it is.

        A stage lets go of what has nothing more to give, while TensorFlow reads ahead. Where nothing begins
        again inside of a pass, the next one may be made at any time.
        """
        if not self._pipeline.draws_at_begin or self._pipeline.draws_inside:
            return None
        self._next = self._next or self._made()
        return start_of(self._next)

    def _known_state(self, taken: bytes) -> tuple[bytes, int]:
        """Return a state of this pass that says where all shuffles stand, and how many batches it is behind.

        Between two repetitions there is no shuffle at all, and to make one would draw its seeds.
        """
        if not self._pipeline.draws_inside:
            return taken, 0
        if shuffles_in(self._as_built or b"") <= shuffles_in(taken):
            self._known = taken, self._count
        elif self._known is None:
            return taken, 0
        state, count = self._known
        return state, self._count - count

    def _state_now(self) -> bytes | None:
        """Return the state of the open iterator, None if its batches are to be read again."""
        if self._reads_again is None and self._taken is None:
            try:
                self._taken = state_of(self._open, shuffles_inside=self._pipeline.has_shuffles_inside)
            except CannotBeSaved as error:
                if self._is_tried:
                    raise UnsupportedStateError(
                        f"batches: the state of the tf.data pipeline, which could be taken before, cannot be "
                        f"taken now: {reason(error)}",
                        hint="make its shuffle buffer smaller, or keep its cache in a file",
                    ) from None
                self._reads_again = reason(error)
                self._watch = DrawWatch(self._dataset)
                self._say_reading()
            self._say_size(self._taken)
        return self._taken

    def _say(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        for line in self._pipeline.hazards():
            tell(f"batches: tf.data: {line}")
        if self._reads_again:
            self._say_reading()

    def _say_left(self) -> None:
        if self._pipeline.caches_in_memory and not self._is_left_told:
            self._is_left_told = True
            tell(
                "batches: a pass over this tf.data pipeline was left before its end. Whether its cache in "
                "memory is complete then depends on how far TensorFlow had read ahead: what follows may have "
                "another order, with a resume and without one. Read passes to their end, or leave cache() out"
            )

    def _say_reading(self) -> None:
        tell(
            f"batches: this tf.data pipeline has no state that could be kept ({self._reads_again}): a resume "
            "inside an epoch reads its consumed batches again, which takes as long as reading them did; it "
            "is exact if they depend only on the data and on random generators"
        )
        for line in self._pipeline.unrepeatable():
            tell(
                f"batches: {line} draws other numbers when batches are read again: no resume inside an "
                "epoch is exact. Use tf.random.stateless_uniform() and the like, with seeds that come with "
                "the data, such as those of tf.data.Dataset.random(seed=1)"
            )

    def _say_size(self, state: bytes | None) -> None:
        if state is not None and len(state) > _LARGE_BYTES and not self._is_size_told:
            self._is_size_told = True
            tell(
                f"batches: the state of this tf.data pipeline takes {len(state) / 1e6:.0f} MB of each "
                "checkpoint: what its shuffle and prefetch buffers, and caches in memory, hold. Shuffle "
                "names or numbers of samples, and read the samples after that, to make it small"
            )

    def _tell_of_seeds(self, saved: Mapping[str, Any]) -> None:
        found = seeds(self._pipeline)
        other = [name for name in found if list(saved.get(name, ())) != found[name]]
        if other:
            tell(
                f"batches: other seeds than in the checkpoint: {', '.join(other)}. What is shuffled now goes "
                "on as it was; what begins anew has another order than it would have had. Give each shuffle "
                "a seed of its own"
            )
