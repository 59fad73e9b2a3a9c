"""A DataLoader over an IterableDataset that goes on, in another process, with the very batch it stopped at.

Torch's own iterator runs on a shallow copy of the user's loader, whose dataset, sampler, collate function and
worker_init_fn are stand-ins (iterable_side). Where each worker stands travels with its batches, so that what
was read ahead of training is not in the position. A dataset with `state_dict` and `load_state_dict` is
continued by its state, or by that of its iterator. Any other is read again up to the position, in each
worker, from the random generators as they were when the epoch began.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks import epoch_start
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.reading_again import DrawWatch, told_of_reading
from unbroken.frameworks.rng import plain_torch_state, torch_state
from unbroken.frameworks.stream import BY_OBJECT, BY_READING, Stream, left_early
from unbroken.frameworks.torch.iterable_side import IterableSide, StreamEnvelope, StreamPlan
from unbroken.frameworks.torch.loader_checks import (
    check_same_loader,
    check_supported_stream,
    stream_fingerprint,
)
from unbroken.frameworks.torch.worker_side import iterator_of, parent_of_workers
from unbroken.rundir.tell import tell

_State = dict[str, Any]


class _Turns:
    """Stands in for torch's endless sampler over a stream: each item is a batch wanted of the next worker."""

    def __init__(self, seed_generator: torch.Generator) -> None:
        self._seed_generator = seed_generator
        self._is_closed = False
        self.base_seed_state = b""

    def __iter__(self) -> Iterator[None]:
        # The next thing that torch draws, when it starts workers, is their base seed.
        self.base_seed_state = self.base_seed_state or plain_torch_state(self._seed_generator.get_state())
        self._is_closed = False
        return self._wanted()

    def close(self) -> None:
        """Want no more batches."""
        self._is_closed = True

    def _wanted(self) -> Iterator[None]:
        while not self._is_closed:
            yield None


@dataclass(frozen=True, slots=True)
class _Copy:
    """The user's loader with stand-ins, for one pass or, with persistent workers, for all."""

    loader: DataLoader[Any]
    side: IterableSide
    turns: _Turns


class ResumableIterableLoader:
    """A plain DataLoader over an IterableDataset; see `ResumableLoader` for what its methods promise.

    Raises:
        UnsupportedStateError: the loader is not iterated the way torch does, or has no order.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        check_supported_stream(loader)
        self._loader = loader
        self._held = HeldGenerators(_roots(loader))
        # What is read in this process, if there are no workers.
        self._stream = Stream(cast("Any", loader.dataset), partial(epoch_start.marked, self._held), "loader")
        self._epoch = self._batches = self._samples = 0
        self._last_worker: int | None = None
        self._start: _State = {}  # random states as the epoch began
        self._workers: dict[int, _State] = {}  # where workers stood after their last consumed batch
        self._workers_start: _State | None = None  # of persistent workers
        self._workers_lived_on = False
        self._copy: _Copy | None = None
        self._current: Iterator[StreamEnvelope] | None = None
        self._left: Iterator[StreamEnvelope] | None = None  # left early, persistent workers still at it
        self._is_fetching = False
        self._are_workers_known = True
        self._restored: _State | None = None
        self._is_told = self._is_left_told = False
        self._watch: DrawWatch | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def samples(self, back: int) -> list[Any] | None:
        """Return None: the items of a stream have no indices."""
        return None

    def generators(self) -> list[object]:
        """Return the random generators that the loader and its dataset hold; a restore sets them."""
        return self._held.objects()

    def state(self) -> _State:
        """Return the position after the last batch that was handed out, as plain values."""
        if self._restored is not None:
            return {**self._restored, "generators": self._held.capture()}
        self._settle()
        if not self._are_workers_known:
            raise UnsupportedStateError(
                "loader: expected to know where all workers stand, found that a batch failed in one",
                hint="restart from the last checkpoint; a dataset that raises cannot be continued exactly",
            )
        is_between = self._current is None
        if is_between:
            self._say_if_left()
        return {
            "fingerprint": stream_fingerprint(self._loader),
            "epoch": self._epoch,
            "batches": self._batches,
            "samples": self._samples,
            "between_epochs": is_between,
            "last_worker": self._last_worker,
            "epoch_start": None if is_between else self._start,
            "generators": self._held.capture(),
            "workers": self._workers_now(),
            "workers_start": self._workers_start,
            "workers_lived_on": self._workers_lived_on,
        }

    def _workers_now(self) -> dict[int, _State]:
        """Return where those who read stand; this process counts as worker 0 if there are none."""
        if self._loader.num_workers or self._copy is None:
            return dict(self._workers)
        is_needed = self._current is not None or self._stream.continued_by == BY_OBJECT
        return {0: self._copy.side.state()} if is_needed else {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a position, before anything was iterated.

        Raises StateMismatchError, naming every difference, for another loader; then nothing was changed.
        """
        if self._epoch or self._restored is not None:
            raise UsageError(
                f"loader: expected to restore before the first iteration, found epoch {self._epoch}",
                hint="build the loader anew, then restore it",
            )
        saved = cast("_State", dict(state))
        if saved["workers"] or not saved["between_epochs"]:
            check_same_loader(saved["fingerprint"], stream_fingerprint(self._loader))
        self._held = HeldGenerators(_roots(self._loader))
        self._held.restore(saved["generators"])
        self._epoch, self._batches, self._samples = saved["epoch"], saved["batches"], saved["samples"]
        self._start, self._workers = saved["epoch_start"] or {}, dict(saved["workers"])
        self._last_worker = saved["last_worker"]
        self._workers_start, self._workers_lived_on = saved["workers_start"], saved["workers_lived_on"]
        self._restored = saved

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Begin the next epoch, or go on in the epoch of the restored state, and return its batches.

        `after_replay` is called first, for the dataset may be among what it restores; what a resume draws
        after that leaves no trace.
        """
        restored = self._restored
        self._leave(self._current)
        self._settle()
        if after_replay is not None:
            after_replay()
        if restored is not None and inside_epoch and restored["epoch"]:
            if restored["between_epochs"]:
                # For the epoch that follows.
                return _nothing()
            self._go_on(restored)
        elif restored is not None and not restored["between_epochs"]:
            raise UsageError(
                f"loader: expected to go on in epoch {restored['epoch']} after batch {restored['batches']}, "
                "found a new epoch asked for",
                hint="pass inside_epoch=True; a new epoch would drop the rest of this one",
            )
        else:
            self._begin()
        self._restored = None
        assert self._current is not None
        return self._deliver(self._current)

    def _begin(self) -> None:
        self._held = HeldGenerators(_roots(self._loader))
        start = epoch_start.snapshot(self._held)
        lived_on = self._workers_start is not None
        stands_in = lived_on and self._copy is None
        plan = StreamPlan(epoch=self._epoch + 1, states=self._workers)
        self._current = self._open(plan, stands_in=stands_in)
        assert self._copy is not None
        if self._loader.persistent_workers and not lived_on:
            base = self._copy.turns.base_seed_state
            self._workers_start = {"base_seed_state": base, "generators": start["generators"]}
        if not self._loader.persistent_workers:
            self._workers = {}
        self._epoch += 1
        self._batches, self._samples, self._last_worker = 0, 0, None
        self._start, self._workers_lived_on = start, lived_on
        self._watch = None if self._loader.num_workers else DrawWatch(self._loader.dataset)

    def _go_on(self, restored: _State) -> None:
        workers, last = self._loader.num_workers, self._last_worker
        now = {**epoch_start.snapshot(self._held), "generators": restored["generators"]}
        epoch_start.apply(self._held, self._start)
        turns = 0 if last is None else (last + 1) % workers
        plan = StreamPlan(epoch=self._epoch, states=self._workers, turns=turns)
        self._current = self._open(plan, stands_in=self._workers_lived_on)
        epoch_start.apply(self._held, now)

    def _open(self, plan: StreamPlan, *, stands_in: bool) -> Iterator[StreamEnvelope]:
        if self._copy is not None and self._loader.persistent_workers:
            return cast("Iterator[StreamEnvelope]", iterator_of(self._copy.loader))
        if not stands_in:
            self._copy = self._make_copy(plan, self._loader.generator)
            return cast("Iterator[StreamEnvelope]", iterator_of(self._copy.loader))
        # Workers that stand in for ones that lived on start from what those started from: the same base seed,
        # drawn aside because it was drawn in an earlier epoch, and the same dataset.
        assert self._workers_start is not None
        now = epoch_start.snapshot(self._held)
        generator = torch.Generator()
        generator.set_state(torch_state(self._workers_start["base_seed_state"]))
        self._held.restore(self._workers_start["generators"])
        self._copy = self._make_copy(plan, generator)
        iterator = iterator_of(self._copy.loader)
        epoch_start.apply(self._held, now)
        return cast("Iterator[StreamEnvelope]", iterator)

    def _make_copy(self, plan: StreamPlan, generator: torch.Generator | None) -> _Copy:
        loader, is_here = self._loader, not self._loader.num_workers
        side = IterableSide(
            loader,
            plan=plan,
            stream=self._stream if is_here else None,
            held=self._held if is_here else None,
            parent=None if is_here else parent_of_workers(loader),
        )
        turns = _Turns(torch.default_generator if generator is None else generator)
        twin = copy.copy(loader)
        # Past the setters, which refuse to change a loader that is built. Without a batch sampler torch asks
        # the dataset for one thing at a time, which is a batch.
        vars(twin).update(
            dataset=side,
            batch_sampler=None,
            sampler=turns,
            collate_fn=side.collate,
            worker_init_fn=side.start_worker,
            generator=generator,
            _iterator=None,
            _IterableDataset_len_called=None,
        )
        return _Copy(twin, side, turns)

    def _deliver(self, this: Iterator[StreamEnvelope]) -> Iterator[Any]:
        try:
            while (envelope := self._next(this)) is not None:
                self._record(envelope)
                if not envelope.has_batch:
                    continue
                self._batches += 1
                self._samples += envelope.size
                self._last_worker = envelope.worker
                self._tell_how()
                # While it waits, this frame must not keep the batch alive.
                batch = [envelope.batch]
                del envelope
                yield batch.pop()
        except GeneratorExit:
            self._leave(this)
            raise
        self._leave(this)

    def _next(self, this: Iterator[StreamEnvelope]) -> StreamEnvelope | None:
        if this is not self._current:
            raise UsageError(
                "loader: expected one iteration at a time, found a batch asked of an earlier one",
                hint="wrap a second DataLoader to iterate twice at once",
            )
        watch = self._watch if self._is_read_again() else None
        if watch is not None:
            watch.before()
        self._is_fetching = True
        envelope = next(this, None)
        self._is_fetching = False
        if watch is not None:
            watch.after()
        return envelope

    def _is_read_again(self) -> bool:
        if not self._loader.num_workers:
            return self._stream.continued_by == BY_READING
        return any(state["stream"]["continued_by"] == BY_READING for state in self._workers.values())

    def _tell_how(self) -> None:
        if not self._is_told:
            self._is_told = True
            if self._is_read_again():
                tell(told_of_reading(self._loader.dataset, workers=self._loader.num_workers))

    def _leave(self, this: Iterator[StreamEnvelope] | None) -> None:
        if this is None or this is not self._current:
            return
        assert self._copy is not None
        self._current = None
        self._copy.turns.close()
        if not self._loader.persistent_workers:
            self._workers = {}
            return
        # Batches in flight still move the workers. They are waited for when that matters, not here: this may
        # run while a crashed script is being torn down.
        self._left = this
        if self._is_fetching:
            self._are_workers_known = False

    def _say_if_left(self) -> None:
        loader = self._loader
        states = [state["stream"] for state in self._workers.values()] if loader.persistent_workers else []
        is_unclear = any(
            state["object"] is not None and not state["is_own_iterator"] and not state["is_over"]
            for state in states
        )
        if not loader.num_workers:
            is_unclear = not self._stream.may_be_left
        if is_unclear and not self._is_left_told:
            self._is_left_told = True
            tell(f"loader: {left_early(loader.dataset)}; no resume from this position is possible")

    def _settle(self) -> None:
        left, self._left = self._left, None
        if left is None:
            return
        were_known, self._are_workers_known = self._are_workers_known, False
        for envelope in left:
            self._record(envelope)
        self._are_workers_known = were_known

    def _record(self, envelope: StreamEnvelope) -> None:
        if envelope.error is not None:
            raise envelope.error
        if envelope.worker is not None and envelope.state is not None:
            self._workers[envelope.worker] = envelope.state


def _nothing() -> Iterator[Any]:
    yield from ()


def _roots(loader: DataLoader[Any]) -> dict[str, object]:
    return {
        "generator": loader.generator,
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
    }
