"""A plain torch DataLoader that goes on, in another process, with the very batch it stopped at.

The user's loader is neither subclassed nor changed. At `iter` time torch's own iterator runs on a shallow
copy of it, whose dataset, batch sampler, collate function and worker_init_fn are stand-ins (worker_side,
index_stream). The batches are those of the unwrapped loader, bit for bit.

To go on inside an epoch, its beginning is replayed without reading data: the random generators are put where
they were when the epoch began, torch draws what it draws, the sampler's indices up to the position are
dropped and compared with what was consumed. Workers get the random states that their predecessors had after
their last consumed batch, and the generators of the main process the values of the checkpoint, last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.epoch_start import apply, applying, marking_first_draw, snapshot
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import torch_state
from unbroken.frameworks.torch.delivered import Delivered
from unbroken.frameworks.torch.index_stream import IndexPlan, IndexSource, IndexStream
from unbroken.frameworks.torch.loader_checks import check_supported, check_wish
from unbroken.frameworks.torch.order import Order
from unbroken.frameworks.torch.worker_side import Envelope, WorkerSide, iterator_of, parent_of_workers

_State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One pass over the loader: torch's iterator, and the indices it draws."""

    envelopes: Iterator[Envelope]
    indices: IndexStream


@dataclass(frozen=True, slots=True)
class _Copy:
    """The user's loader with stand-ins, for one iteration or, with persistent workers, for all."""

    loader: DataLoader[Any]
    source: IndexSource


class ResumableLoader:
    """A plain map-style DataLoader whose iteration can stop after any batch and go on in another process.

        loader = ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True, num_workers=8))
        for batch in loader.iterate():
            ...
            state = loader.state()          # plain values; the batch counts as consumed

        loader.restore(state)               # in another process, over the same loader built anew
        for batch in loader.iterate(inside_epoch=True, after_replay=restore_rng):
            ...                             # begins with the next batch

    One iteration at a time: beginning another ends the one before.

    Raises:
        UnsupportedStateError: the loader has no order to come back to, or is not iterated the way torch does.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        check_supported(loader)
        self._loader = loader
        self._held = HeldGenerators(_roots(loader))
        self._order = Order(loader)
        self._consumed = 0  # samples since this iteration began here
        self._delivered = Delivered()
        self._epoch = 0
        self._batches = 0
        self._samples = 0
        self._is_short = False
        self._digest: bytes | None = None
        self._marks: _State = {}  # random states as the epoch began
        self._workers: dict[int, object] = {}  # random states after each worker's last consumed batch
        self._workers_start: _State | None = None  # of persistent workers
        self._workers_lived_on = False
        self._copy: _Copy | None = None
        self._current: _Iteration | None = None
        self._left: _Iteration | None = None  # left early, persistent workers still at it
        self._are_workers_known = True
        self._is_fetching = False
        self._restored: _State | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def generators(self) -> list[object]:
        """Return the random generators that the loader and its dataset hold; a restore sets them."""
        return self._held.objects()

    def samples(self, back: int) -> list[Any] | None:
        """Return the indices in the batch that was handed out `back` batches ago, 1 being the newest.

        None if that is not known: it was handed out in another pass or process, or is long gone.
        """
        return self._delivered.samples(back)

    def state(self) -> dict[str, object]:
        """Return the position after the last batch that was handed out, as plain values.

        The generators of the main process that everybody shares are not part of it. Values are shared with
        later states; do not change them. After persistent workers were left in the middle of an epoch, the
        first call waits for the batches in flight, for they move the workers' generators.

        Raises:
            UnsupportedStateError: a generator that the loader or its dataset held is gone, or a batch in
                flight failed, so that the random states of the workers are not known.
        """
        if self._restored is not None and not self._restored["between_epochs"]:
            return dict(self._restored)
        self._settle()
        if not self._are_workers_known:
            raise UnsupportedStateError(
                "loader: expected the random states of all workers, found that a batch failed in one",
                hint="restart from the last checkpoint; a dataset that raises cannot be continued exactly",
            )
        is_between = self._current is None
        return {
            **self._order.state(self._consumed),
            "epoch": self._epoch,
            "batches": self._batches,
            "samples": self._samples,
            "is_short": self._is_short,
            "between_epochs": is_between,
            "index_digest": self._digest,
            "epoch_start": None if is_between else self._marks["start"],
            "first_draw": None if is_between else self._marks.get("first_draw"),
            "generators": self._held.capture(),
            "workers": dict(self._workers),
            "workers_start": self._workers_start,
            "workers_lived_on": self._workers_lived_on,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a position, before anything was iterated.

        Sets the generators that the loader and its dataset hold; the shared ones are the caller's to set.

        Raises:
            StateMismatchError: the loader differs from the one of `state`; names every difference. Nothing
                was changed.
        """
        if self._epoch or self._restored is not None:
            raise UsageError(
                f"loader: expected to restore before the first iteration, found epoch {self._epoch}",
                hint="build the loader anew, then restore it",
            )
        saved = cast("_State", dict(state))
        self._order.check(saved)
        saved = self._order.without_cut_off(saved)
        self._held = HeldGenerators(_roots(self._loader))
        self._held.restore(saved["generators"])
        self._order.restore(saved)
        self._epoch, self._batches, self._samples = saved["epoch"], saved["batches"], saved["samples"]
        self._is_short = saved["is_short"]
        self._digest, self._workers = saved["index_digest"], dict(saved["workers"])
        self._workers_start, self._workers_lived_on = saved["workers_start"], saved["workers_lived_on"]
        self._restored = saved

    def iterate(
        self, *, inside_epoch: bool = False, after_replay: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Begin the next epoch, or go on in the epoch of the restored state, and return its batches.

        All that torch draws when an iteration begins is drawn by this call, not at the first batch.

        Args:
            inside_epoch: yield what the restored epoch has left, which is nothing if it had ended or had been
                left. A loader that had not begun any epoch begins its first.
            after_replay: called once, to put the generators that everybody shares where they were at the
                checkpoint: after all that the replay draws in the main process and before its first batch,
                or before a new epoch draws anything.

        Raises:
            StateMismatchError: the sampler's order is not the one that was consumed.
            UsageError: `inside_epoch` without a restored state, or a new epoch while that one is open.
        """
        check_wish(self._restored, inside_epoch)
        self._leave(self._current)
        self._settle()
        restored = self._restored
        goes_on = restored is not None and inside_epoch and restored["epoch"] > 0
        is_moved = restored is not None and self._order.is_moved(restored)
        if restored is not None and goes_on:
            if restored["between_epochs"]:
                self._held.restore(restored["generators"])
            elif not is_moved:
                self._current = self._go_on(restored)
        if after_replay is not None:
            after_replay()
        if not goes_on:
            self._epoch += 1
            self._current = self._begin()
        elif restored is not None and is_moved and not restored["between_epochs"]:
            # The global order goes on, but with other shares nothing else can be as it was.
            self._workers, self._workers_start = {}, None
            self._current = self._begin()
        self._restored = None
        return self._drive(self._current)

    def _begin(self) -> _Iteration:
        self._held = held = HeldGenerators(_roots(self._loader))
        place = self._order.begin()
        marks: _State = {"start": snapshot(held)}
        lived_on = self._workers_start is not None
        stand_in = lived_on and self._copy is None
        plan = IndexPlan(
            place=place,
            once_workers_run=applying(held, marks["start"]) if stand_in else None,
            before_first_draw=marking_first_draw(held, marks) if not self._loader.num_workers else None,
        )
        iteration = self._open(plan)
        if self._loader.persistent_workers and not lived_on:
            self._remember_workers_start(marks["start"])
        self._batches, self._samples, self._is_short, self._digest = 0, 0, False, None
        self._marks, self._workers_lived_on = marks, lived_on
        return iteration

    def _go_on(self, restored: _State) -> _Iteration:
        held, skip, workers = self._held, restored["batches"], self._loader.num_workers
        marks: _State = {"start": restored["epoch_start"]}
        if restored["first_draw"] is not None:
            marks["first_draw"] = restored["first_draw"]
        is_lazy = not workers and "first_draw" not in marks
        plan = IndexPlan(
            skip_batches=skip,
            skip_samples=restored["samples"],
            is_short=restored["is_short"],
            place=self._order.go_on(restored),
            skipped_digest=restored["index_digest"],
            turns=skip % workers if workers else 0,
            once_workers_run=applying(held, marks["start"]) if restored["workers_lived_on"] else None,
            before_first_draw=marking_first_draw(held, marks) if is_lazy else None,
        )
        apply(held, marks["start"])
        iteration = self._open(plan)
        if not workers and "first_draw" in marks:
            # Without workers torch draws the order at the first batch, not when the iteration begins.
            apply(held, marks["first_draw"])
            iteration.indices.prime()
        for _ in range(plan.turns):
            self._record(next(iteration.envelopes))
        # Only now as many indices are drawn in advance as were when the state was taken.
        held.restore(restored["generators"])
        self._order.after_replay(restored)
        self._marks = marks
        return iteration

    def _open(self, plan: IndexPlan) -> _Iteration:
        self._consumed, self._delivered = 0, Delivered()
        if self._copy is None or not self._loader.persistent_workers:
            self._copy = self._make_copy(stands_in=plan.once_workers_run is not None)
        self._copy.source.begin(plan)
        envelopes = iterator_of(self._copy.loader)
        return _Iteration(cast("Iterator[Envelope]", envelopes), self._copy.source.stream)

    def _make_copy(self, *, stands_in: bool) -> _Copy:
        loader = self._loader
        seed_generator = torch.default_generator if loader.generator is None else loader.generator
        if stands_in:
            # Workers that stand in for ones that lived on start from what those started from: the same base
            # seed, drawn aside because it was drawn in an earlier epoch, and the same dataset.
            assert self._workers_start is not None
            seed_generator = torch.Generator(seed_generator.device)
            seed_generator.set_state(torch_state(self._workers_start["base_seed_state"]))
            self._held.restore(self._workers_start["generators"])
        side = WorkerSide(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            held=None if loader.num_workers else self._held,
            states=self._workers,
            parent=parent_of_workers(loader),
        )
        source = IndexSource(cast("Any", loader.batch_sampler), seed_generator)
        twin = copy.copy(loader)
        # Past the setters, which refuse to change a loader that is built.
        vars(twin).update(
            dataset=side,
            batch_sampler=source,
            collate_fn=side.collate,
            worker_init_fn=side.start_worker,
            generator=seed_generator if stands_in else loader.generator,
            _iterator=None,
        )
        return _Copy(twin, source)

    def _remember_workers_start(self, start: _State) -> None:
        assert self._copy is not None
        self._workers_start = {
            "base_seed_state": self._copy.source.base_seed_state,
            "generators": start["generators"],
        }

    def _drive(self, iteration: _Iteration | None) -> Iterator[Any]:
        if iteration is None:
            return
        try:
            while True:
                if iteration is not self._current:
                    raise UsageError(
                        "loader: expected one iteration at a time, found a batch asked of an earlier one",
                        hint="wrap a second DataLoader to iterate twice at once",
                    )
                self._is_fetching = True
                envelope = next(iteration.envelopes, None)
                self._is_fetching = False
                if envelope is None:
                    break
                self._record(envelope)
                self._digest, indices = iteration.indices.delivered()
                self._delivered.add(indices)
                size = len(indices)
                self._batches += 1
                self._samples += size
                self._consumed += size
                self._is_short = size < (getattr(self._loader.batch_sampler, "batch_size", None) or 0)
                # While it waits, this frame must not keep the batch alive.
                batch = [envelope.batch]
                del envelope
                yield batch.pop()
        except GeneratorExit:
            self._leave(iteration)
            raise
        self._leave(iteration)

    def _leave(self, iteration: _Iteration | None) -> None:
        if iteration is None or iteration is not self._current:
            return
        self._current = None
        iteration.indices.close()
        self._order.end()
        if not self._loader.persistent_workers:
            self._workers = {}
            return
        # Batches in flight still move the workers' generators. They are waited for when that matters, not
        # here: this may run while a crashed script is being torn down.
        self._left = iteration
        if self._is_fetching:
            self._are_workers_known = False

    def _settle(self) -> None:
        left, self._left = self._left, None
        if left is None:
            return
        were_known, self._are_workers_known = self._are_workers_known, False
        for envelope in left.envelopes:
            self._record(envelope)
        self._are_workers_known = were_known

    def _record(self, envelope: Envelope) -> None:
        if envelope.error is not None:
            raise envelope.error
        if envelope.worker is not None and envelope.rng is not None:
            self._workers[envelope.worker] = envelope.rng


def _roots(loader: DataLoader[Any]) -> dict[str, object]:
    return {
        "generator": loader.generator,
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "batch_sampler": loader.batch_sampler,
        "sampler": loader.sampler,
    }
