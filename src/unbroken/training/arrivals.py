"""The tensors of a checkpoint on their way into live objects, without a second copy of them in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unbroken.state.paths import part_of
from unbroken.state.tensors import AwaitedTensor, LoadedTensor, TensorSource, address_of
from unbroken.training.adaptation import AdaptedCheckpoint


class Arrivals:
    """Reads a checkpoint: the tensors of the parts `streamed` when they have a place, of `others` now.

    Raises DamagedError, now and in `land`, naming what is not as it was saved.
    """

    def __init__(
        self, checkpoint: AdaptedCheckpoint, streamed: Collection[str], others: Collection[str]
    ) -> None:
        self._checkpoint = checkpoint
        paths = checkpoint.manifest.tensors
        self._streamed = {path for path in paths if part_of(path) in streamed}
        now = [path for path in paths if part_of(path) in others]
        self._kept: dict[str, LoadedTensor] = dict(checkpoint.load_tensors(now))

    def get(self, path: str) -> LoadedTensor:
        """Return the tensor at `path`, its bytes read."""
        if path not in self._kept:
            self._kept |= self._checkpoint.load_tensors([path])
        return self._kept[path]

    def flight(self, live: Mapping[str, TensorSource]) -> Flight:
        """Begin to make tensors; those at a path of `live` may be filled where they are."""
        return Flight(self, self._checkpoint, live)

    def is_streamed(self, path: str) -> bool:
        """Tell whether the bytes of the tensor at `path` wait for their place."""
        return path in self._streamed


class Flight:
    """The tensors of one restore: first all are made, by `get`, then `land` brings their bytes."""

    def __init__(
        self, arrivals: Arrivals, checkpoint: AdaptedCheckpoint, live: Mapping[str, TensorSource]
    ) -> None:
        self._arrivals = arrivals
        self._checkpoint = checkpoint
        self._live = live
        self._awaited: dict[str, AwaitedTensor] = {}

    def get(self, path: str) -> LoadedTensor:
        """Return the tensor at `path`, of which something can be made; the same one when asked again."""
        if not self._arrivals.is_streamed(path):
            return self._arrivals.get(path)
        if path not in self._awaited:
            entry = self._checkpoint.manifest.tensors[path]
            self._awaited[path] = AwaitedTensor(
                entry.dtype,
                entry.shape,
                lambda: self._arrivals.get(path).data,
                live=self._live.get(path),
            )
        return self._awaited[path]

    def land(self) -> dict[str, int]:
        """Read the bytes of everything that was made to where it was made, each verified.

        Returns the addresses that they went to.
        """
        memory = {
            path: awaited.memory for path, awaited in self._awaited.items() if awaited.memory is not None
        }
        self._checkpoint.load_into(memory)
        return {path: address_of(view) for path, view in memory.items()}
