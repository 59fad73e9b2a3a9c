"""Stands in for a loader's batch sampler: skips what was consumed, checks the order."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.rng import plain_torch_state

# In place of a batch of indices: the worker whose turn it is answers without reading anything.
TAKE_TURN = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """How an iteration begins.

    Attributes:
        skip: batches that were consumed; their indices are drawn and dropped.
        skipped_digest: of the indices of those batches.
        turns: workers that answer without reading first, so that the next batch meets its own worker again.
        once_workers_run: given, new workers stand in for ones that lived on from an earlier epoch. Torch's
            first `iter`, which the original iteration did not make, then leaves the sampler alone, and this
            is called at its second one, when the workers run and before the sampler is touched.
        before_first_draw: called before the first indices are drawn.
    """

    skip: int = 0
    skipped_digest: bytes | None = None
    turns: int = 0
    once_workers_run: Callable[[], None] | None = None
    before_first_draw: Callable[[], None] | None = None


class IndexSource:
    """What torch's iterator calls `iter` on; each call begins a new `IndexStream`.

    Torch calls once for an iteration without workers or with workers that live on, and twice when it starts
    workers: before it draws their base seed, and once they run.
    """

    def __init__(self, batch_sampler: Iterable[Any], seed_generator: torch.Generator) -> None:
        self._batch_sampler = batch_sampler
        self._seed_generator = seed_generator
        self._plan = IndexPlan()
        self._calls = 0
        self._stream: IndexStream | None = None
        self.base_seed_state = b""

    def __len__(self) -> int:
        return len(cast("Sized", self._batch_sampler))

    def __iter__(self) -> Iterator[Any]:
        self._calls += 1
        if self._plan.once_workers_run is not None:
            if self._calls == 1:
                return iter(())
            self._plan.once_workers_run()
        self._stream = IndexStream(iter(self._batch_sampler), self._plan)
        if self._calls == 1:
            # The next thing that torch draws is the base seed of the workers.
            self.base_seed_state = plain_torch_state(self._seed_generator.get_state())
        return self._stream

    def begin(self, plan: IndexPlan) -> None:
        """Set how the next iteration begins."""
        self._plan, self._calls, self._stream = plan, 0, None

    @property
    def stream(self) -> IndexStream:
        """The stream of the iteration that torch began last."""
        assert self._stream is not None, "torch has not iterated the batch sampler"
        return self._stream


class IndexStream:
    """The batches of indices of one iteration."""

    def __init__(self, batches: Iterator[Any], plan: IndexPlan) -> None:
        self._batches = batches
        self._plan = plan
        self._turns = plan.turns
        self._is_primed = False
        self._is_closed = False
        self._digest = hashlib.blake2b(digest_size=16)
        self._in_flight: deque[tuple[bytes, int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_closed:
            raise StopIteration
        self.prime()
        if self._turns:
            self._turns -= 1
            return TAKE_TURN
        batch = self._draw()
        self._in_flight.append((self._digest.digest(), len(batch)))
        return batch

    def prime(self) -> None:
        """Draw and drop the skipped batches, if that has not been done.

        Raises:
            StateMismatchError: their indices are not those that were consumed.
        """
        if self._is_primed:
            return
        self._is_primed = True
        if self._plan.before_first_draw is not None:
            self._plan.before_first_draw()
        for number in range(self._plan.skip):
            try:
                self._draw()
            except StopIteration:
                raise _order_error(f"expected {self._plan.skip} batches, found {number}") from None
        if self._plan.skip and self._digest.digest() != self._plan.skipped_digest:
            raise _order_error(f"expected the {self._plan.skip} consumed batches, found other indices")

    def delivered(self) -> tuple[bytes, int]:
        """Return the digest of all indices up to the oldest batch in flight, and that batch's size."""
        return self._in_flight.popleft()

    def close(self) -> None:
        """End the stream: no more batches are drawn from the sampler."""
        self._is_closed = True

    def _draw(self) -> Any:
        batch = next(self._batches)
        if not hasattr(batch, "__len__"):
            batch = list(batch)
        # With their number, batches of other sizes do not pass for the same ones.
        self._digest.update(len(batch).to_bytes(8, "little") + _index_bytes(batch))
        return batch


def _index_bytes(batch: Any) -> bytes:
    try:
        return array("q", batch).tobytes()
    except (TypeError, OverflowError):
        return repr([_plain_index(index) for index in batch]).encode()


def _plain_index(index: object) -> object:
    if isinstance(index, (tuple, list)):
        return tuple(_plain_index(item) for item in index)
    # Only what prints as its value: an address would be another one in every process.
    if index is None or isinstance(index, (bool, int, float, str, bytes)):
        return index
    if hasattr(index, "__index__"):
        return index.__index__()
    raise UnsupportedStateError(
        f"loader: expected numbers, strings or tuples of them as indices, found a {type(index).__name__}",
        hint="let the sampler yield plain indices and look the objects up in the dataset",
    )


def _order_error(found: str) -> StateMismatchError:
    return StateMismatchError(
        f"loader: the sampler's order depends on state that is not kept: {found}",
        hint="give the sampler a generator of its own, or draw its order from torch's seed, once an epoch",
    )
