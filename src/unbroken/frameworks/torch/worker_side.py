"""What runs where batches are made: reads and collates for the user's loader, reports random states."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, get_worker_info

from unbroken.errors import UnbrokenError, UnsupportedStateError
from unbroken.frameworks.generators import HeldGenerators
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.index_stream import TAKE_TURN

_PR_SET_PDEATHSIG = 1
_NOTHING = object()


class Envelope(NamedTuple):
    """A batch on its way to the training loop.

    A named tuple, because torch pins the items of one in place and leaves plain values alone.

    Attributes:
        batch: what the user's collate function returned; None from a worker that only took its turn.
        worker: which worker made it, None in the main process.
        rng: the worker's random states after it.
        error: why nothing this process makes can be resumed; raised in the main process.
    """

    batch: Any
    worker: int | None = None
    rng: dict[str, object] | None = None
    error: UnbrokenError | None = None


class WorkerSide:
    """Dataset, collate function and worker_init_fn of the copied loader, in the main process or in a worker.

    Args:
        held: the generators of dataset and collate function; None where a worker looks for its own.
        states: random states by worker, set once a worker has been initialised.
        parent: the process whose death ends the workers; None if that cannot be told.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], None] | None,
        held: HeldGenerators | None = None,
        states: Mapping[int, object] | None = None,
        parent: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._held = held
        self._states = dict(states or {})
        self._parent = parent
        self._worker: int | None = None
        self._error: UnbrokenError | None = None
        self._batches = 0

    def start_worker(self, worker: int) -> None:
        """Run the user's worker_init_fn, then put the worker's generators where its predecessor's were."""
        prepare_worker(worker, self._dataset, self._worker_init_fn, self._parent)
        self._worker = worker
        try:
            self._held = HeldGenerators({"dataset": self._dataset, "collate_fn": self._collate_fn})
            if worker in self._states:
                self._restore(cast("Mapping[str, Any]", self._states[worker]))
        except UnbrokenError as error:
            # Torch would raise it as a RuntimeError and drop the hint.
            self._error = error

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Any) -> Any:
        if self._error is not None or indices is TAKE_TURN:
            return _NOTHING
        getitems = getattr(self._dataset, "__getitems__", None)
        return getitems(indices) if getitems else [self._dataset[index] for index in indices]

    def collate(self, samples: Any) -> Envelope:
        """Collate as the user's function does; what it returns goes into an envelope."""
        if samples is _NOTHING:
            return Envelope(None, worker=self._worker, error=self._error)
        batch = self._collate_fn(samples)
        self._batches += 1
        try:
            self._refuse_late_generators()
            return Envelope(batch, worker=self._worker, rng=self._capture())
        except UnbrokenError as error:
            return Envelope(None, worker=self._worker, error=error)

    def _capture(self) -> dict[str, object] | None:
        if self._worker is None:
            return None
        assert self._held is not None
        return {"global": capture_global_rng(), "generators": self._held.capture()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self._held is not None
        self._held.restore(state["generators"])
        restore_present_rng(state["global"])

    def _refuse_late_generators(self) -> None:
        """Raise UnsupportedStateError if reading samples made a generator.

        A resumed process could not set it before it has been drawn from. Looking costs a walk, so it is done
        after 1, 2, 4, 8... batches: all but the oddest are caught in the first.
        """
        assert self._held is not None
        if self._batches & (self._batches - 1):
            return
        refuse_late(self._held)


def refuse_late(held: HeldGenerators) -> None:
    """Raise UnsupportedStateError if there are generators that were not there before."""
    late = held.look_again()
    if late:
        raise UnsupportedStateError(
            f"loader: expected all random generators before the first sample is read, found "
            f"{', '.join(late)} made while reading",
            hint="make it in the dataset's __init__ or in worker_init_fn",
        )


def parent_of_workers(loader: DataLoader[Any]) -> int | None:
    """Return the process that the workers may die with, None if they must not or cannot be told its death.

    The kernel ties the signal to the thread that starts them: a thread that prepares an iterator and ends
    would take its workers along. Of a fork server, workers are not even children of this process.
    """
    context = loader.multiprocessing_context or multiprocessing
    is_child = context.get_start_method() in {"fork", "spawn"}
    is_main = threading.current_thread() is threading.main_thread()
    return os.getpid() if loader.num_workers and is_child and is_main else None


def prepare_worker(
    worker: int, dataset: object, worker_init_fn: Callable[[int], None] | None, parent: int | None
) -> None:
    """Make this process a worker of the user's loader: bound to its parent, with the user's init run."""
    if parent is not None:
        _die_with(parent)
    # Ctrl-C in a terminal, and the signal of many a scheduler, reaches the whole process group; the trainer
    # alone decides what it means, and may still want the batches in flight. Dead workers end it at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_sigterm(os.getpid())
    # The user's function expects the dataset there, to give it a generator for instance. The class
    # refuses plain assignment, also where it is no frozen dataclass.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def iterator_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a pass of torch's own over `loader`, whose workers `prepare_worker` prepares."""
    iterator = DataLoader.__iter__(loader)
    for worker in getattr(iterator, "_workers", ()):
        _PREPARED.add(worker)
    return iterator


def _outlive_sigterm(worker: int) -> None:
    def on_sigterm(number: int, _: FrameType | None) -> None:
        if os.getpid() != worker:
            # A process that reading a sample has forked is none of ours.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # A handler, for what a worker starts would inherit that the signal is ignored, and could not be ended.
    signal.signal(signal.SIGTERM, on_sigterm)
    # Libraries in C may not expect that their reading is interrupted.
    signal.siginterrupt(signal.SIGTERM, False)


class _Workers:
    """Workers that outlive SIGTERM, by which Python ends its children as it exits; it waits for them then."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
        self._parent: int | None = None

    def add(self, worker: BaseProcess) -> None:
        if self._parent != os.getpid():
            # Later than that of multiprocessing, and so called before it.
            self._parent = os.getpid()
            self._found.clear()
            atexit.register(self._end, self._parent)
        self._found.add(worker)

    def _end(self, parent: int) -> None:
        # A forked child has inherited the list, and the call; the workers are not its own.
        living = [worker for worker in self._found if worker.is_alive()] if parent == os.getpid() else []
        if living:
            # Torch watches for workers that die, and would raise wherever this exit has come to.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in living:
            worker.kill()


_PREPARED = _Workers()


def _die_with(parent: int) -> None:
    """Have the kernel kill this worker when the thread that started it ends. Linux only.

    Otherwise workers of a killed trainer stay: torch's own watchdog never looks while the worker's queue is
    stuck writing to a full pipe, whose read end its siblings hold open.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call; then no signal comes.
    if os.getppid() != parent:
        os._exit(1)
