"""A storage that fails or dies at a chosen operation, for kill-point and error tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from unbroken.storage.base import Buffer, Names, Space, Storage

_T = TypeVar("_T")


class Killed(BaseException):
    """The process died here. A BaseException, so that no handler for errors can take it for one."""


class FaultyStorage:
    """Passes everything on to `storage`, and calls `fail` at the operation with number `at`.

    Only operations that change something count, from 0. With `after_effect` the operation is done
    first; without, a value is half written before the fault, as a real crash may leave it.
    """

    def __init__(self, storage: Storage, *, at: int = -1, after_effect: bool = False) -> None:
        self.storage = storage
        self.at = at
        self.after_effect = after_effect
        self.operations: list[str] = []
        self.fail: Callable[[], None] = _die

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        # An atomic write is never half done: it fails before or after.
        return self._at_point(f"write {key}", lambda: self.storage.write(key, chunks))

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        dies_inside = len(self.operations) == self.at and not self.after_effect
        torn = self._torn(chunks) if dies_inside else chunks
        if dies_inside:
            self.operations.append(f"stage {key}")
            return self.storage.stage(key, torn)
        return self._at_point(f"stage {key}", lambda: self.storage.stage(key, torn))

    def copy(self, source: str, target: str) -> int:
        return self._at_point(f"copy {source} -> {target}", lambda: self.storage.copy(source, target))

    def move(self, source: str, target: str) -> None:
        self._at_point(f"move {source} -> {target}", lambda: self.storage.move(source, target))

    def delete(self, key: str) -> None:
        self._at_point(f"delete {key}", lambda: self.storage.delete(key))

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        return self.storage.read(key, start, size_bytes)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        self.storage.read_into(key, start, target)

    def size(self, key: str) -> int | None:
        return self.storage.size(key)

    def list(self, prefix: str = "") -> Names:
        return self.storage.list(prefix)

    def space(self) -> Space | None:
        return self.storage.space()

    def _at_point(self, name: str, act: Callable[[], _T]) -> _T:
        here = len(self.operations) == self.at
        self.operations.append(name)
        if here and not self.after_effect:
            self.fail()
        result = act()
        if here and self.after_effect:
            self.fail()
        return result

    def _torn(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            yield memoryview(chunk)[: len(chunk) // 2]
            self.fail()


def _die() -> None:
    raise Killed
