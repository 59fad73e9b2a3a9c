"""What the workers of a MultiWorkerMirroredStrategy tell each other between two steps."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from unbroken.errors import UsageError
from unbroken.frameworks.tensorflow.processes import Worker, this_worker

# One that is still loading its data may be late.
_MEETING_SECONDS = 600
# As long as others wait for a rank that may be busy with something of its own, an evaluation say.
_WAITING_SECONDS = 1800
# Strategies number their groups from 1: nobody else has this one.
_GROUP = 0x756E6272
_WORD_BYTES = 8


class Ranks:
    """All workers. Each method is called by every one of them at the same place of its step.

    On the host, and never in a background thread: collectives there would meet those of training.
    """

    def __init__(self, worker: Worker) -> None:
        self.rank = worker.rank
        self.world_size = worker.count
        self._calls = count(1)

    def meet(self) -> None:
        """Return when all workers are here; raise UsageError if one is not in time."""
        try:
            self._gathered(np.zeros(1, np.int64), _MEETING_SECONDS)
        except (
            tf.errors.DeadlineExceededError,
            tf.errors.UnavailableError,
            tf.errors.InternalError,
        ) as error:
            raise UsageError(
                f"Run: expected all {self.world_size} workers to enter it, found that one does not "
                f"(waited up to {_MEETING_SECONDS} s: {str(error).splitlines()[0]:.200})",
                hint="make the Run on every worker, with the same directory, behind the strategy",
            ) from error

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all workers, in order; as many from each. One small collective.

        Raises UsageError if one of them does not come here in time.
        """
        return [each.tolist() for each in self._together(np.array(mine, np.int64))]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, in order; plain values only."""
        data = pickle.dumps(value)
        sizes = [size for (size,) in self.numbers([len(data)])]
        words = -(-max(sizes) // _WORD_BYTES)
        # All pieces of a collective have one size.
        padded = np.frombuffer(data.ljust(words * _WORD_BYTES, b"\0"), np.int64)
        found = self._together(padded)
        # Of workers that run the same script, on an address that they gave each other.
        return [pickle.loads(one.tobytes()[:size]) for one, size in zip(found, sizes, strict=True)]  # noqa: S301

    def collect(self, value: Any) -> list[Any] | None:
        """Return the values of all workers to the first one, None to the others."""
        found = self.gather(value)
        return found if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first worker."""
        return self.gather(value if self.rank == 0 else None)[0]

    def _together(self, mine: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return what each worker gives, in the order of the workers, whatever that of the runtime is."""
        try:
            found = self._gathered(mine, _WAITING_SECONDS)
        except tf.errors.DeadlineExceededError as error:
            # One that waits in a sum of gradients meanwhile, which has no end, ends when this one is gone.
            raise UsageError(
                f"expected all {self.world_size} workers at the same place, found that worker {self.rank} "
                f"waited {_WAITING_SECONDS} s for another one there",
                hint="give every worker as many batches: dataset.shard() of a number that cannot be divided "
                "does not; and call run.step on every worker, once for each step of all",
            ) from error
        return [row[1:] for row in found[np.argsort(found[:, 0])]]

    def _gathered(self, mine: np.ndarray[Any, Any], timeout_seconds: float) -> np.ndarray[Any, Any]:
        with tf.device("CPU:0"):
            found: np.ndarray[Any, Any] = tf.raw_ops.CollectiveGatherV2(
                input=np.concatenate([[self.rank], mine]).reshape(1, -1),
                group_size=self.world_size,
                group_key=_GROUP,
                instance_key=next(self._calls),
                ordering_token=[],
                timeout_seconds=timeout_seconds,
            ).numpy()
        return found


_KNOWN: dict[Worker, Ranks] = {}


def ranks() -> Ranks | None:
    """Return the workers that this one trains with, or None if it trains alone."""
    worker = this_worker()
    if worker is None:
        return None
    # Once for each cluster: what is said in it is counted.
    return _KNOWN.setdefault(worker, Ranks(worker))
