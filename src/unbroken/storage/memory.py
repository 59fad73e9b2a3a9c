"""A storage in the memory of this process: for tests, and for trying things out."""

from __future__ import annotations

from collections.abc import Iterable

from unbroken.storage.base import Buffer, Names, Space, check_key, cut_short, exists, missing


class MemoryStorage:
    """Keeps each value as one entry of a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"MemoryStorage({len(self._values)} values)"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        value = b"".join(bytes(chunk) for chunk in chunks)
        self._values[check_key(key)] = value
        return len(value)

    def stage(self, key: str, chunks: Iterable[Buffer]) -> int:
        if self._below(key):
            raise exists("stage", key)
        return self.write(key, chunks)

    def sync(self, tree: str) -> None:
        check_key(tree)

    def link(self, source: str, target: str) -> bool:
        if check_key(source) not in self._values:
            raise missing("link", source)
        if self._below(target):
            raise exists("link", target)
        self._values[target] = self._values[source]
        return True

    def move(self, source: str, target: str) -> None:
        moved = self._below(source)
        if not moved:
            raise missing("move", source)
        if self._below(target):
            raise exists("move", target)
        for key in moved:
            self._values[target + key.removeprefix(source)] = self._values.pop(key)

    def read(self, key: str, start: int = 0, size_bytes: int | None = None) -> bytearray:
        if check_key(key) not in self._values:
            raise missing("read", key)
        value = self._values[key]
        expected = len(value) - start if size_bytes is None else size_bytes
        found = value[start : start + expected]
        if len(found) != expected:
            raise cut_short(key, expected, len(found))
        return bytearray(found)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = self.read(key, start, len(target))

    def size(self, key: str) -> int | None:
        value = self._values.get(check_key(key))
        return None if value is None else len(value)

    def list(self, prefix: str = "") -> Names:
        head = f"{check_key(prefix)}/" if prefix else ""
        return sorted({key[len(head) :].split("/")[0] for key in self._values if key.startswith(head)})

    def delete(self, key: str) -> None:
        for below in self._below(key):
            del self._values[below]

    def space(self) -> Space | None:
        return None

    def _below(self, key: str) -> Names:
        check_key(key)
        return [name for name in self._values if name == key or name.startswith(f"{key}/")]
