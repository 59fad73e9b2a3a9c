"""From what a pickle says to plain values and tensors. How classes are read is told by `constructors.py`."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

from unbroken.inspection.formats.base import encodable
from unbroken.inspection.formats.opcodes import Global, Object, Pairs, Persistent
from unbroken.inspection.formats.views import Storage, View, make_view

_DEEPEST = 100
_LONGEST_PATH = 4096
# A small file can give a long name to each of very many tensors.
_MOST_PATH_CHARACTERS = 1 << 27
# What is reached again and again may be of any size, though the file is small.
_MOST_REPEATED = 200_000
# A long text costs as much as many values.
_CHARACTERS_A_VALUE = 64
# Longer byte strings are listed as tensors, as in our own checkpoints.
_INLINE_BYTES = 64
# Counters, sizes and seeds are no longer.
_SMALL_BITS = 128
_MOST_NAMED = 100
# A key is printed whole if it is no longer than this.
_LONGEST_KEY_ITEMS = 16

# Reads an `Object` of a known kind, at a path and a depth.
Constructor: TypeAlias = Callable[["Reading", Object, str, int], Any]


class Reading:
    """Turns what a pickle built into plain values, and collects the tensors in it by their paths.

    `attributes` are what hangs on a dictionary or a list beside its items, by the path of that.
    """

    def __init__(
        self, constructors: Mapping[str, Constructor], storage_of: Callable[[Any], Storage | None]
    ) -> None:
        self._constructors = constructors
        self.tensors: dict[str, View] = {}
        # Ordered, and each path once.
        self.aliases: dict[str, dict[str, None]] = {}
        self.attributes: dict[str, Any] = {}
        self.notes: list[str] = []
        self.storage_of = storage_of
        self._path_of: dict[object, str] = {}
        self._taken: set[str] = set()
        self._path_characters = 0
        self._doubles: dict[str, int] = {}
        self._unread = 0
        self._encoded: dict[int, memoryview] = {}
        self._seen: set[int] = set()
        self._left = _MOST_REPEATED

    def value(self, node: Any, path: str = "", depth: int = 0) -> Any:
        """Return `node` as plain data; a tensor in it becomes a reference to its path."""
        if not isinstance(node, Object) and is_small_number(node):
            return node
        if depth > _DEEPEST or len(path) > _LONGEST_PATH:
            return self._too_deep()
        if not self.affords(node):
            return self.too_many()
        # Most nodes are these: tensors.
        if isinstance(node, Object):
            return self.object(node, path, depth)
        if isinstance(node, int | str):
            return encodable(node) if isinstance(node, str) else node
        if isinstance(node, list | tuple):
            return self.items(node, path, depth)
        if isinstance(node, memoryview):
            return self.byte_string(node, path)
        if isinstance(node, Pairs):
            return self.mapping(node.pairs, path, depth)
        if isinstance(node, Persistent):
            return self._outside(node, path, depth)
        return encodable(node.kind) if isinstance(node, Global) else "(a mark)"

    def items(self, items: Iterable[Any], path: str, depth: int) -> list[Any]:
        """Return the items of a sequence."""
        return [self.value(item, join(path, index), depth + 1) for index, item in enumerate(items)]

    def mapping(self, pairs: Iterable[tuple[Any, Any]], path: str, depth: int) -> dict[str, Any]:
        """Return a dictionary, with the names of its keys."""
        named: dict[tuple[str, Hashable], str] = {}
        items: dict[str, Any] = {}
        doubles: dict[str, int] = {}
        for index, (key, item) in enumerate(pairs):
            name, kind = self._name(key, index)
            # Keys 1 and "1" of one dictionary. Of the same key the last value counts.
            if (name, kind) not in named:
                named[name, kind] = _apart(name, items, doubles)
            items[named[name, kind]] = item
        return {name: self.value(item, join(path, name), depth + 1) for name, item in items.items()}

    def tensor(self, view: View, path: str) -> dict[str, Any]:
        """Enter a tensor and return the reference to it."""
        path = path or "data"
        first = self._path_of.get(view.identity)
        if path == first or (first is not None and path in self.aliases.get(first, ())):
            return {"$tensor": first}
        # "a/b" may be one key, and the key "b" of what stands under "a".
        path = _apart(path, self._taken, self._doubles)
        self._path_characters += len(path)
        if self._path_characters > _MOST_PATH_CHARACTERS:
            return {"$object": self._given_up("too many long names of tensors", "(more)")}
        self._taken.add(path)
        if first is None:
            first = self._path_of[view.identity] = path
            self.tensors[path] = view
        else:
            self.aliases.setdefault(first, {})[path] = None
        return {"$tensor": first}

    def unread(self, path: str, why: str) -> None:
        """Note that what stands at `path` is a tensor that is not read."""
        self._unread += 1
        if self._unread <= _MOST_NAMED:
            self.notes.append(f"tensor {path or 'data'} is not read: {why}")
        elif self._unread == _MOST_NAMED + 1:
            self.notes.append(f"more than {_MOST_NAMED} tensors are not read")

    def attach(self, state: Any, path: str, depth: int) -> None:
        """Keep what hangs on the dictionary or list at `path` beside its items."""
        if is_something(state):
            place = _apart(path or "(top)", self.attributes, self._doubles)
            self.attributes[place] = self.value(state, join(path, "(attributes)"), depth + 1)

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
        shown: dict[str, Any] = {"$object": encodable(node.kind)}
        if node.arguments:
            shown["arguments"] = self.value(node.arguments, path, depth + 1)
        if node.items:
            shown["items"] = self.value(node.items, path, depth + 1)
        if node.pairs:
            shown["pairs"] = self.mapping(node.pairs, path, depth + 1)
        if node.state is not None:
            shown["state"] = self.value(node.state, path, depth + 1)
        return shown

    def affords(self, node: Any) -> bool:
        """Tell whether there may be more of what repeats; what is met for the first time always may."""
        size = 1
        if isinstance(node, Object):
            size += len(node.pairs) + len(node.items)
        elif isinstance(node, str):
            size = len(node) // _CHARACTERS_A_VALUE
        elif isinstance(node, int):
            size = node.bit_length() // (3 * _CHARACTERS_A_VALUE)
        elif isinstance(node, list | tuple):
            size += len(node)
        elif isinstance(node, Pairs):
            size += len(node.pairs)
        if size and id(node) in self._seen:
            self._left -= size
            return self._left >= 0
        if size:
            self._seen.add(id(node))
        return True

    def too_many(self) -> str:
        """Return what stands for values that are left out because they repeat others without end."""
        return self._given_up(f"more than {_MOST_REPEATED} values that repeat others", "(more)")

    def _name(self, key: Any, index: int) -> tuple[str, Hashable]:
        """Return the name of a key, and what tells it from other keys of that name.

        What is nested in a key has no place in its name: each level would double its length.
        """
        if _is_flat(key):
            return str(self.value(key)), (type(key),)
        if _are_flat(key):
            return str(self.value(key)), tuple(map(type, key))
        if isinstance(key, Object):
            if _is_flat_object(key):
                return str(self.value(key)), key.kind
            return f"({encodable(key.kind)} key {index})", index
        return f"({type(key).__name__} key {index})", index

    def _outside(self, node: Persistent, path: str, depth: int) -> Any:
        storage = self.storage_of(node.identity)
        if storage is None:
            identity = self.value(node.identity, path, depth + 1)
            return {"$object": "(outside the pickle)", "arguments": identity}
        return {"$object": "torch storage", "arguments": [storage.key]}

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


def is_small_number(node: Any) -> bool:
    """Tell whether a node is None or a number that takes no more room than any other value."""
    return (
        node is None
        or isinstance(node, bool | float)
        or (isinstance(node, int) and node.bit_length() <= _SMALL_BITS)
    )


def is_something(state: Any) -> bool:
    """Tell whether a state that hangs on an object says anything."""
    return state is not None and not (isinstance(state, Pairs) and not state.pairs)


def _is_flat(node: Any) -> bool:
    if isinstance(node, memoryview):
        return len(node) <= _INLINE_BYTES
    return node is None or isinstance(node, bool | int | float | str | Global)


def _are_flat(nodes: Any) -> bool:
    return isinstance(nodes, tuple) and len(nodes) <= _LONGEST_KEY_ITEMS and all(map(_is_flat, nodes))


def _is_flat_object(node: Object) -> bool:
    """Tell whether an object is a member of an enum, a number of NumPy, a path or the like."""
    if node.items or node.pairs or not isinstance(node.arguments, tuple):
        return False
    if node.kind == "numpy.dtype":
        return _are_flat(node.arguments) and (node.state is None or _are_flat(node.state))
    inner = [item for item in node.arguments if isinstance(item, Object)]
    rest = tuple(item for item in node.arguments if not isinstance(item, Object))
    return (
        node.state is None
        and _are_flat(rest)
        and not any(isinstance(item, str) and len(item) > _INLINE_BYTES for item in rest)
        and all(item.kind == "numpy.dtype" and _is_flat_object(item) for item in inner)
    )


def _apart(name: str, taken: Container[str], doubles: MutableMapping[str, int]) -> str:
    """Return `name` if it is free, or else the next like it that is; `doubles` counts how many there were."""
    found = name
    while found in taken:
        doubles[name] = count = doubles.get(name, 0) + 1
        found = name + ("'" * count if count < 4 else f"'{count}")
    return found
