"""Faults where a test wants them: in an operation of a storage, or in a system call below it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from unbroken.storage import bulk, local
from unbroken.storage.base import Buffer, Names, Space, Storage

_T = TypeVar("_T")

# What the storage asks of the system. Closing is left out: it always happens.
_CALLS = {
    *("open", "read", "preadv", "pwrite", "fsync", "stat", "lstat", "listdir", "scandir", "statvfs"),
    *("mkdir", "rename", "replace", "link", "unlink", "rmdir"),
}


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

    def sync(self, tree: str) -> None:
        self._at_point(f"sync {tree}", lambda: self.storage.sync(tree))

    def link(self, source: str, target: str) -> bool:
        return self._at_point(f"link {source} -> {target}", lambda: self.storage.link(source, target))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCall:
    """A call that `LocalStorage` is about to make; `number` counts them from 0."""

    number: int
    name: str
    arguments: tuple[Any, ...]
    make: Callable[[], Any]


# Makes the call, or raises, or both; what it returns the storage gets.
Rule = Callable[[SystemCall], Any]


@contextmanager
def system_calls(rule: Rule | None = None) -> Iterator[list[SystemCall]]:
    """Pass every system call of `LocalStorage` through `rule`; yields a list that those made are put on.

    with system_calls(fails(at=3, error=errno.EIO)):
        storage.write("key", [b"value"])
    """
    made: list[SystemCall] = []
    numbers = itertools.count()

    def pass_on(name: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        call = SystemCall(
            number=next(numbers), name=name, arguments=arguments, make=lambda: real(*arguments, **options)
        )
        made.append(call)
        return call.make() if rule is None else rule(call)

    system = _System(pass_on)
    reserve = bulk.reserve
    with (
        patch.object(local, "os", system),
        patch.object(bulk, "os", system),
        patch.object(bulk, "reserve", lambda *arguments: pass_on("fallocate", reserve, *arguments)),
    ):
        yield made


class _System:
    """Stands in for the module `os`."""

    def __init__(self, pass_on: Callable[..., Any]) -> None:
        self._pass_on = pass_on

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in _CALLS:
            return found
        return lambda *arguments, **options: self._pass_on(name, found, *arguments, **options)


def fails(at: int, error: int, *, times: int = 1) -> Rule:
    """From the call with number `at` on, `times` calls fail with the errno `error`, and do nothing."""

    def rule(call: SystemCall) -> Any:
        if at <= call.number < at + times:
            raise OSError(error, os.strerror(error))
        return call.make()

    return rule


def dies(at: int, *, after_effect: bool = False) -> Rule:
    """The process dies in the call with number `at`: no later one has an effect, cleaning up neither.

    Without `after_effect` the call is not made, but for a write: that is half done.
    """

    def rule(call: SystemCall) -> Any:
        if call.number < at:
            return call.make()
        if call.number == at and after_effect:
            call.make()
        elif call.number == at and call.name == "pwrite":
            descriptor, view, offset = call.arguments
            # Direct I/O wants whole pages.
            half = len(view) // 2
            os.pwrite(descriptor, view[: half - half % 4096 or half], offset)
        raise Killed

    return rule
