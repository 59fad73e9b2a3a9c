"""Stands in for a loader's batch sampler: skips what was consumed, checks the order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from blake3 import blake3
from torch.utils.data import BatchSampler

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.rng import plain_torch_state

# In place of a batch of indices: the worker whose turn it is answers without reading anything.
TAKE_TURN = None
_CHUNK = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """How an iteration begins.

    Attributes:
        skip_batches: those that were consumed; their indices are drawn and dropped.
        skip_samples: as many samples were in them. A plain batch sampler cuts what its sampler gives, so
            that these are dropped there, and the rest may be cut into batches of another size.
        is_short: whether the last of them had fewer samples than others, which is how a plain batch sampler
            finds that its sampler has ended.
        skipped_digest: of the indices of those batches.
        place: epoch and position at which an elastic sampler begins; nothing has to be skipped then.
        turns: workers that answer without reading first, so that the next batch meets its own worker again.
        once_workers_run: given, new workers stand in for ones that lived on from an earlier epoch. Torch's
            first `iter`, which the original iteration did not make, then leaves the sampler alone, and this
            is called at its second one, when the workers run and before the sampler is touched.
        before_first_draw: called before the first indices are drawn.
    """

    skip_batches: int = 0
    skip_samples: int = 0
    is_short: bool = False
    skipped_digest: bytes | None = None
    place: tuple[int, int] | None = None
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
        self._stream = IndexStream(self._batch_sampler, self._plan)
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

    def __init__(self, batch_sampler: Any, plan: IndexPlan) -> None:
        self._is_plain = is_plain(batch_sampler)
        self._batch_sampler = batch_sampler
        # Of a plain one nothing happens here: it is a generator function.
        self._batches = iter(batch_sampler)
        self._plan = plan
        self._turns = plan.turns
        self._is_primed = False
        self._is_closed = False
        self._digest = blake3()
        self._in_flight: deque[tuple[bytes, Any]] = deque()

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
        self._in_flight.append((self._digest.digest(), batch))
        return batch

    def prime(self) -> None:
        """Draw and drop what is skipped, if that has not been done.

        Raises:
            StateMismatchError: the indices are not those that were consumed.
        """
        if self._is_primed:
            return
        self._is_primed = True
        plan = self._plan
        if plan.before_first_draw is not None:
            plan.before_first_draw()
        if plan.place is not None:
            self._batches = self._cut(self._batch_sampler.sampler.iterate_from(*plan.place))
            return
        if not plan.skip_batches:
            return
        if self._is_plain:
            self._skip_samples(plan.skip_samples)
        else:
            self._skip_batches(plan.skip_batches)
        if self._digest.digest() != plan.skipped_digest:
            raise _order_error(f"expected the {plan.skip_batches} consumed batches, found other indices")

    def delivered(self) -> tuple[bytes, Any]:
        """Return the digest of all indices up to the oldest batch in flight, and that batch's indices."""
        return self._in_flight.popleft()

    def close(self) -> None:
        """End the stream: no more batches are drawn from the sampler."""
        self._is_closed = True

    def _skip_samples(self, count: int) -> None:
        indices, left = iter(self._batch_sampler.sampler), count
        while left:
            part = list(islice(indices, min(left, _CHUNK)))
            if not part:
                raise _order_error(f"expected {count} samples, found {count - left}")
            self._digest.update(_index_bytes(part))
            left -= len(part)
        if self._plan.is_short and next(indices, self) is not self:
            raise _order_error(f"expected {count} samples, found more")
        self._batches = self._cut(indices)

    def _cut(self, indices: Iterator[Any]) -> Iterator[Any]:
        return iter(BatchSampler(indices, self._batch_sampler.batch_size, self._batch_sampler.drop_last))

    def _skip_batches(self, count: int) -> None:
        for number in range(count):
            try:
                self._draw()
            except StopIteration:
                raise _order_error(f"expected {count} batches, found {number}") from None

    def _draw(self) -> Any:
        batch = next(self._batches)
        if not hasattr(batch, "__len__"):
            batch = list(batch)
        if not self._is_plain:
            # With their number, batches of other sizes do not pass for the same ones.
            self._digest.update(len(batch).to_bytes(8, "little"))
        self._digest.update(_index_bytes(batch))
        return batch


def is_plain(batch_sampler: object) -> bool:
    """Tell whether batches are cut from the order of a sampler, which then does not depend on their size."""
    return type(batch_sampler) is BatchSampler


def _index_bytes(batch: Any) -> bytes:
    """Return what stands for the indices, each for itself: the same however they are cut into batches."""
    try:
        return array("q", batch).tobytes()
    except (TypeError, OverflowError):
        return b"".join(map(_one_index_bytes, batch))


def _one_index_bytes(index: object) -> bytes:
    try:
        return array("q", (cast("int", index),)).tobytes()
    except (TypeError, OverflowError):
        return repr(_plain_index(index)).encode() + b"\0"


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
