"""What a format has to tell so that `convert` can write it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.state.tensors import TensorSource
from unbroken.storage.local import LocalStorage


class UnreadTensor(TensorSource):
    """A tensor of a checkpoint, read when its bytes are asked for."""

    __slots__ = ("_path", "_reader", "dtype", "shape")

    def __init__(self, reader: CheckpointReader, path: str) -> None:
        self.dtype, self.shape = reader.tensors[path].dtype, reader.tensors[path].shape
        self._reader = reader
        self._path = path

    @property
    def identity(self) -> Hashable | None:
        return None

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.data

    @property
    def data(self) -> memoryview:
        return self._reader.read(self._path)


class Target(ABC):
    """A format that tensors are written in. `suffix` is how the name of its file ends."""

    suffix: ClassVar[str]

    @abstractmethod
    def files(self, target: Path) -> tuple[Path, ...]:
        """Return the files in the order of their writing: without the last, no reader sees a checkpoint."""

    @abstractmethod
    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        """Return why a tensor has no place in this format, None if it has."""

    def keeps_names(self, reader: CheckpointReader) -> bool:
        """Tell whether tensors of `reader` are found by their names, so that they may have others."""
        return True

    def check(self, reader: CheckpointReader) -> None:
        """Raise UsageError if no such file can be made of `reader`."""
        return

    def notes(self, reader: CheckpointReader) -> Iterator[str]:
        """Yield what is to be said of the files made of `reader`."""
        return iter(())

    @abstractmethod
    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        """Write `tensors` of `reader`, one at a time in memory, and return the number of bytes.

        `storage` is the directory of `target`. Raises DamagedError if a tensor is not all there.
        """
