"""From what a pickle says to plain values and tensors. How classes are read is told by `constructors.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from unbroken.inspection.formats.base import printable
from unbroken.inspection.formats.opcodes import Global, Object, Pairs, Persistent
from unbroken.inspection.formats.views import Storage, View, make_view

_DEEPEST = 100
_LONGEST_PATH = 4096
# What is reached again and again may be of any size, though the file is small.
_MOST_REPEATED = 200_000
# A long text costs as much as many values.
_CHARACTERS_A_VALUE = 64
# Longer byte strings are listed as tensors, as in our own checkpoints.
_INLINE_BYTES = 64

# Reads an `Object` of a known kind, at a path and a depth.
Constructor: TypeAlias = Callable[["Reading", Object, str, int], Any]


class Reading:
    """Turns what a pickle built into plain values, and collects the tensors in it by their paths."""

    def __init__(
        self, constructors: Mapping[str, Constructor], storage_of: Callable[[Any], Storage | None]
    ) -> None:
        self._constructors = constructors
        self.tensors: dict[str, View] = {}
        # Ordered, and each path once.
        self.aliases: dict[str, dict[str, None]] = {}
        self.notes: list[str] = []
        self.storage_of = storage_of
        self._path_of: dict[object, str] = {}
        self._encoded: dict[int, memoryview] = {}
        self._seen: set[int] = set()
        self._left = _MOST_REPEATED

    def value(self, node: Any, path: str = "", depth: int = 0) -> Any:
        """Return `node` as plain data; a tensor in it becomes a reference to its path."""
        if node is None or isinstance(node, bool | int | float):
            return node
        if depth > _DEEPEST or len(path) > _LONGEST_PATH:
            return self._too_deep()
        if not self.affords(node):
            return self.too_many()
        if isinstance(node, str):
            return printable(node)
        if isinstance(node, list | tuple):
            return self.items(node, path, depth)
        if isinstance(node, memoryview):
            return self.byte_string(node, path)
        if isinstance(node, Pairs):
            return self.mapping(node.pairs, path, depth)
        if isinstance(node, Object):
            return self.object(node, path, depth)
        if isinstance(node, Persistent):
            return self._outside(node, path)
        return printable(node.kind) if isinstance(node, Global) else "(a mark)"

    def items(self, items: Iterable[Any], path: str, depth: int) -> list[Any]:
        """Return the items of a sequence."""
        return [self.value(item, join(path, index), depth + 1) for index, item in enumerate(items)]

    def mapping(self, pairs: Iterable[tuple[Any, Any]], path: str, depth: int) -> dict[str, Any]:
        """Return a dictionary, with the names of its keys."""
        found: dict[str, Any] = {}
        kinds: dict[str, type] = {}
        for key, item in pairs:
            name = self._name(key)
            # Keys 1 and "1" of one dictionary. Of the same key the last value counts.
            if kinds.setdefault(name, type(key)) is not type(key):
                name += "'"
            found[name] = self.value(item, join(path, name), depth + 1)
        return found

    def tensor(self, view: View, path: str) -> dict[str, str]:
        """Enter a tensor and return the reference to it."""
        path = path or "data"
        first = self._path_of.setdefault(view.identity, path)
        if first != path:
            self.aliases.setdefault(first, {})[path] = None
        else:
            self.tensors[path] = view
        return {"$tensor": first}

    def byte_string(self, data: memoryview, path: str) -> Any:
        """Return a short byte string as Python prints it; a long one is listed as a tensor."""
        if len(data) <= _INLINE_BYTES:
            return repr(bytes(data))
        view = make_view(Storage(key="", dtype="U8", data=data), 0, (len(data),), (1,))
        return self.tensor(view, path) if view is not None else f"({len(data)} bytes)"

    def encoded(self, text: str) -> memoryview:
        """Return the bytes that a text in Latin-1 stands for, made once however often it is met."""
        found = self._encoded.get(id(text))
        if found is None:
            found = self._encoded[id(text)] = memoryview(text.encode("latin-1", "replace"))
        return found

    def object(self, node: Object, path: str, depth: int) -> Any:
        """Return what the constructor of its kind reads in `node`."""
        if depth > _DEEPEST:
            return self._too_deep()
        read: Constructor = self._constructors.get(node.kind, Reading.unknown)
        return read(self, node, path, depth)

    def unknown(self, node: Object, path: str, depth: int) -> dict[str, Any]:
        """Return the class that `node` names, with all that was to be put into it."""
        shown: dict[str, Any] = {"$object": printable(node.kind)}
        if node.arguments:
            shown["arguments"] = self.value(node.arguments, path, depth + 1)
        if node.items:
            shown["items"] = self.value(node.items, path, depth + 1)
        if node.pairs:
            shown["pairs"] = self.mapping(node.pairs, path, depth + 1)
        if node.state is not None:
            shown["state"] = self.value(node.state, path, depth + 1)
        return shown

    def _name(self, key: Any) -> str:
        if isinstance(key, str) and self.affords(key):
            return printable(key)
        plain = self.value(key, "(key)", _DEEPEST - 3)
        return str(plain)

    def affords(self, node: Any) -> bool:
        """Tell whether there may be more of what repeats; what is met for the first time always may."""
        size = 1
        if isinstance(node, str):
            size = len(node) // _CHARACTERS_A_VALUE
        elif isinstance(node, list | tuple):
            size += len(node)
        elif isinstance(node, Pairs | Object):
            size += len(node.pairs) + (len(node.items) if isinstance(node, Object) else 0)
        if size and id(node) in self._seen:
            self._left -= size
            return self._left >= 0
        if size:
            self._seen.add(id(node))
        return True

    def _outside(self, node: Persistent, path: str) -> Any:
        storage = self.storage_of(node.identity)
        if storage is None:
            return {"$object": "(outside the pickle)", "arguments": self.value(node.identity, path, _DEEPEST)}
        return {"$object": "torch storage", "arguments": [storage.key]}

    def too_many(self) -> str:
        """Return what stands for values that are left out because they repeat others without end."""
        return self._given_up(f"more than {_MOST_REPEATED} values that repeat others", "(more)")

    def _too_deep(self) -> str:
        return self._given_up(f"nested deeper than {_DEEPEST}, or names too long", "(deeper)")

    def _given_up(self, why: str, text: str) -> str:
        note = f"{why}: the rest is not shown"
        if note not in self.notes:
            self.notes.append(note)
        return text


def join(path: str, name: object) -> str:
    """Return the path of what stands under `name` at `path`."""
    return f"{path}/{name}" if path else str(name)
