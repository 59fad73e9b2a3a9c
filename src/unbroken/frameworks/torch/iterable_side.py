"""What runs where the batches of an IterableDataset are made: reads, collates, reports where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate, default_convert

from unbroken.errors import StateMismatchError, UnbrokenError
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.stream import BY_READING, Stream
from unbroken.frameworks.torch.worker_side import WorkerSide
from unbroken.rundir.tell import tell


class StreamEnvelope(NamedTuple):
    """A batch on its way to the training loop, or only word from the worker whose turn it is.

    A named tuple, because torch pins the items of one in place and leaves plain values alone.

    Attributes:
        batch: what the user's collate function returned; None if there is none.
        has_batch: False where a worker only took its turn or met the end of its part of the data.
        size: the items in the batch.
        worker: which worker made it, None in the main process.
        state: where the worker stands after it; None in the main process, which asks when it needs to.
        error: why this cannot be resumed; raised in the main process.
    """

    batch: Any = None
    has_batch: bool = False
    size: int = 0
    worker: int | None = None
    state: dict[str, Any] | None = None
    error: UnbrokenError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """How the first pass of a process begins.

    Attributes:
        epoch: its number. One whose state is of that epoch goes on in it, of an earlier one begins it.
        states: where workers stood, by worker; 0 stands for the main process.
        turns: workers that answer without reading first, so that the next batch comes from the right one.
    """

    epoch: int
    states: Mapping[int, Mapping[str, Any]]
    turns: int = 0


class IterableSide:
    """Dataset, collate function and worker_init_fn of the copied loader, in the main process or in a worker.

    Torch asks it for whole batches, one at a time: it batches itself, so that word of the end arrives.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        plan: StreamPlan,
        stream: Stream | None,
        held: HeldGenerators | None,
        parent: int | None,
    ) -> None:
        self._dataset: Any = loader.dataset
        self._collate_fn = loader.collate_fn
        self._is_batching = loader.batch_sampler is not None
        self._batch_size = loader.batch_size or 1
        self._drop_last = loader.drop_last
        self._plan: StreamPlan | None = plan
        self._epoch = plan.epoch
        self._worker: int | None = None
        self._held = held
        self._starting = WorkerSide(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            parent=parent,
        )
        self._stream = stream
        self._begun_from: dict[str, Any] | None = None
        self._error: UnbrokenError | None = None
        self._batches = 0
        self._has_ended = self._is_looked_at = False

    def start_worker(self, worker: int) -> None:
        """Run the user's worker_init_fn."""
        self._starting.start_worker(worker)
        self._worker = worker

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, as the plan says for the first one of this process; torch calls it as it begins."""
        plan, self._plan = self._plan, None
        turns = 0
        if plan is None:
            self._epoch += 1
        try:
            self._begin(None if plan is None else plan.states.get(self._worker or 0))
        except UnbrokenError as error:
            # Torch would raise it as a RuntimeError and drop the hint.
            self._error = error
        if plan is not None and self._worker is not None and self._worker < plan.turns:
            turns = 1
        return self._read(turns)

    def collate(self, samples: Any) -> StreamEnvelope:
        """Collate as the user's function does; what it returns goes into an envelope."""
        if self._error is not None or isinstance(samples, _Word):
            return StreamEnvelope(worker=self._worker, state=self._word(samples), error=self._error)
        batch = self._collate_fn(samples)
        size = len(samples) if self._is_batching else 1
        self._batches += 1
        try:
            self._tell_of_late_generators()
            self._live.check_moves()
            return StreamEnvelope(batch, has_batch=True, size=size, worker=self._worker, state=self._word())
        except UnbrokenError as error:
            return StreamEnvelope(worker=self._worker, error=error)

    def state(self) -> dict[str, Any]:
        """Return where this process stands after the last batch it made, as plain values."""
        return {
            "rng": self._random_state(),
            "begun_from": self._begun_from,
            "stream": self._live.position(),
            "epoch": self._epoch,
            "has_ended": self._has_ended,
            "batches": self._batches,
        }

    @property
    def stream(self) -> Stream:
        """What is read in this process."""
        return self._live

    @property
    def _live(self) -> Stream:
        assert self._stream is not None, "torch has not begun to read the dataset"
        return self._stream

    def _begin(self, state: Mapping[str, Any] | None) -> None:
        if self._worker is not None:
            self._held = HeldGenerators({"dataset": self._dataset, "collate_fn": self._collate_fn})
        if self._stream is None:
            self._stream = Stream(self._dataset, self._mark_generators, "loader")
        if state is None:
            self._begin_anew(self._stream.begin)
        elif state["epoch"] != self._epoch:
            self._set_random_state(state["rng"])
            position = state["stream"]
            self._begin_anew(lambda: self._live.begin_after(position))
        else:
            self._go_on(state)

    def _begin_anew(self, begin: Callable[[], None]) -> None:
        self._has_ended, self._batches = False, 0
        self._begun_from = self._random_state() if self._worker is not None else None
        begin()

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self._begun_from = state["begun_from"]
        if self._begun_from is not None:
            self._set_random_state(self._begun_from)
        self._has_ended, self._batches = state["has_ended"], state["batches"]
        redo = None if _draws_nothing(self._collate_fn) else self._redo(state)
        self._live.go_on(state["stream"], redo)
        is_own = state["stream"]["continued_by"] != BY_READING
        if self._worker is not None and not is_own and not state["stream"]["is_over"]:
            self._check_random_state(state["rng"])
        self._set_random_state(state["rng"])

    def _redo(self, state: Mapping[str, Any]) -> Callable[[Stream], None]:
        """Return what reads the consumed items again, collating them for what the user's function draws."""

        def redo(stream: Stream) -> None:
            for _ in range(state["batches"]):
                samples = self._next_batch(stream)
                if samples is _THE_END:
                    return
                self._collate_fn(samples)

        return redo

    def _read(self, turns: int) -> Iterator[Any]:
        if turns:
            yield _TURN
        if self._error is not None:
            yield _TURN
            return
        if self._has_ended:
            return
        while (samples := self._next_batch(self._live)) is not _THE_END:
            yield samples
        self._has_ended = True
        yield _THE_END

    def _next_batch(self, stream: Iterable[Any]) -> Any:
        """Return the samples of the next batch, or the word of the end."""
        items = iter(stream)
        if not self._is_batching:
            return next(items, _THE_END)
        samples = []
        for item in items:
            samples.append(item)
            if len(samples) == self._batch_size:
                return samples
        return samples if samples and not self._drop_last else _THE_END

    def _word(self, samples: Any = None) -> dict[str, Any] | None:
        # A turn says nothing new.
        if self._worker is None or samples is _TURN or self._error is not None:
            return None
        return self.state()

    def _random_state(self) -> dict[str, Any]:
        assert self._held is not None
        shared = capture_global_rng() if self._worker is not None else None
        return {"global": shared, "generators": self._held.capture()}

    def _mark_generators(self) -> Callable[[], None]:
        state = self._random_state()
        return lambda: self._set_random_state(state)

    def _set_random_state(self, state: Mapping[str, Any]) -> None:
        assert self._held is not None
        self._held.restore(state["generators"])
        if state["global"] is not None:
            restore_present_rng(state["global"])

    def _check_random_state(self, state: Mapping[str, Any]) -> None:
        if self._random_state() != state:
            raise StateMismatchError(
                f"loader: read again, {type(self._dataset).__name__} drew other random numbers than before",
                hint="what it reads must depend on the data and on random generators only; or give it "
                "state_dict() and load_state_dict()",
            )

    def _tell_of_late_generators(self) -> None:
        """Say which generators were made while items were read; reading again makes them again."""
        if self._is_looked_at or self._live.continued_by == BY_READING or self._worker:
            return
        assert self._held is not None
        self._is_looked_at = True
        late = self._held.look_again()
        if late:
            tell(
                f"loader: {', '.join(late)} made while {type(self._dataset).__name__} was read: for a resume "
                "to be exact, its state_dict has to hold where they are"
            )


class _Word(NamedTuple):
    """In place of samples: nothing was read."""

    name: str


_TURN = _Word("turn")
_THE_END = _Word("end")


def _draws_nothing(collate_fn: object) -> bool:
    return collate_fn in (default_collate, default_convert)
