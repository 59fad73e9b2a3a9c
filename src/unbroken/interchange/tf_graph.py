"""The objects that a TensorFlow checkpoint was made of, and what people call the variables in it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from unbroken.errors import DamagedError, StorageError
from unbroken.interchange.files import damaged
from unbroken.interchange.protobuf import content, fields, number, text
from unbroken.interchange.tf_bundle import TfBundle

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
ATTRIBUTES = "/.ATTRIBUTES/"
VALUE = "VARIABLE_VALUE"

_LARGEST_GRAPH_BYTES = 1 << 28
# A cycle through long names could make paths of any length.
_LONGEST_PATH = 4096
# A small file can lead by a long path to very many objects.
_MOST_PATH_CHARACTERS = 1 << 26
# These hold what belongs to other objects, or what another name says better.
_LISTS = {"_trainable_variables": 1000, "_variables": 10, "_all_variables": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """What a node keeps: `key` is where, `full_name` the name of its variable, or empty."""

    name: str
    full_name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What an optimizer keeps for a variable: both are numbers of nodes."""

    original: int
    name: str
    slot: int


@dataclass(slots=True, kw_only=True)
class Node:
    """An object: its children by the names that it has for them."""

    children: dict[str, int] = field(default_factory=dict)
    attributes: list[Attribute] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


class ObjectGraph:
    """All objects; the first is the checkpoint itself, whose children are what it was made with."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return by key what a variable is called: first for people, then by the objects it hangs on.

        "model/dense/kernel" may hang on the model and on its optimizer; its own name stands for a path
        through what a library keeps for itself.
        """
        shown = Counter(path for path, _, _ in self._named.values())
        found = {}
        for key, (path, best, aliases) in self._named.items():
            first = path if shown[path] == 1 else best
            found[key] = tuple(dict.fromkeys((first, best, *aliases)))
        return found

    def full_names(self) -> dict[str, str]:
        """Return by key the full name of a variable, of those that have one."""
        return {
            attribute.key: attribute.full_name
            for node in self.nodes
            for attribute in node.attributes
            if attribute.full_name
        }

    @cached_property
    def _named(self) -> dict[str, tuple[str, str, tuple[str, ...]]]:
        """Return by key the path to show, the path through objects, and further ones."""
        best = self._best_paths()
        others = self._other_paths(best)
        found = {}
        left = _MOST_PATH_CHARACTERS
        for number_, path in best.items():
            further = others.get(number_, [])
            for attribute in self.nodes[number_].attributes:
                at = _of_attribute(path, attribute)
                left -= len(at) + sum(map(len, further)) if left > 0 else 0
                aliases = tuple(_of_attribute(other, attribute) for other in further) if left > 0 else ()
                found[attribute.key] = (_shown(at, attribute), at, aliases)
        return found

    def _other_paths(self, best: dict[int, str]) -> dict[int, list[str]]:
        """Return the paths of each node through all that have it, as far as they are not too many."""
        found: dict[int, list[str]] = {}
        left = _MOST_PATH_CHARACTERS
        for number_, path in best.items():
            for name, child in self.nodes[number_].children.items():
                left -= len(path) + len(name)
                if left > 0:
                    found.setdefault(child, []).append(_joined(path, name))
        return found

    def _best_paths(self) -> dict[int, str]:
        """Return the path of each node that has fewest steps, of those through no list of variables."""
        found: dict[int, str] = {}
        waiting = [(0, "", 0)]
        left = _MOST_PATH_CHARACTERS
        while waiting:
            cost, path, current = heapq.heappop(waiting)
            if current in found:
                continue
            found[current] = path
            for name, child in self.nodes[current].children.items():
                longer = _joined(path, name)
                if child not in found and len(longer) <= min(_LONGEST_PATH, left):
                    left -= len(longer)
                    heapq.heappush(waiting, (cost + 1 + _LISTS.get(name, 0), longer, child))
        for current, path in [*found.items()]:
            for slot in self.nodes[current].slots:
                longer = _joined(_joined(path, slot.name), found.get(slot.original, ""))
                if (
                    slot.slot not in found
                    and slot.original in found
                    and len(longer) <= min(_LONGEST_PATH, left)
                ):
                    left -= len(longer)
                    found[slot.slot] = longer
        return found


def read_graph(bundle: TfBundle) -> ObjectGraph | None:
    """Return the objects of a bundle, None if it keeps variables by their names alone.

    Raises DamagedError if what it says of them is not whole.
    """
    entry = bundle.entries.get(GRAPH)
    if entry is None:
        return None
    if entry.stored_bytes > _LARGEST_GRAPH_BYTES:
        raise damaged(GRAPH, f"at most {_LARGEST_GRAPH_BYTES} bytes", f"{entry.stored_bytes}")
    strings = bundle.strings(GRAPH)
    if len(strings) != 1:
        raise damaged(GRAPH, "one string", f"{len(strings)}")
    return parse_graph(memoryview(strings[0]))


def parse_graph(message: memoryview) -> ObjectGraph:
    """Return the objects that a message describes. Raises DamagedError."""
    nodes = [_parse_node(content(item, GRAPH)) for tag, item in fields(message, GRAPH) if tag == 1]
    for node in nodes:
        for other in (*node.children.values(), *(slot.slot for slot in node.slots)):
            if other >= len(nodes):
                raise damaged(GRAPH, f"one of {len(nodes)} objects", f"number {other}")
        if any(slot.original >= len(nodes) for slot in node.slots):
            raise damaged(GRAPH, f"one of {len(nodes)} objects", "a slot of another")
    return ObjectGraph(nodes or [Node()])


def plain_path(key: str) -> str:
    """Return what a variable is called if nothing but its key is known.

    >>> plain_path("model/kernel/.ATTRIBUTES/VARIABLE_VALUE"), plain_path("data/.ATTRIBUTES/ITERATOR_STATE")
    ('model/kernel', 'data/ITERATOR_STATE')
    """
    return key.removesuffix(ATTRIBUTES + VALUE).replace(ATTRIBUTES, "/")


def graph_of(bundle: TfBundle) -> tuple[ObjectGraph | None, str | None]:
    """Return the same as `read_graph`, and in words why it cannot be read."""
    try:
        return read_graph(bundle), None
    except (DamagedError, StorageError) as error:
        return None, error.message


def _parse_node(message: memoryview) -> Node:
    node = Node()
    for tag, item in fields(message, GRAPH):
        if tag == 1:
            child, name = _numbered(content(item, GRAPH), 1, 2)
            node.children[name] = child
        elif tag == 2:
            node.attributes.append(_parse_attribute(content(item, GRAPH)))
        elif tag == 3:
            node.slots.append(_parse_slot(content(item, GRAPH)))
    return node


def _numbered(message: memoryview, at: int, name_at: int) -> tuple[int, str]:
    found = dict(fields(message, GRAPH))
    return number(found.get(at, 0), GRAPH), text(found.get(name_at, memoryview(b"")), GRAPH)


def _parse_attribute(message: memoryview) -> Attribute:
    found = dict(fields(message, GRAPH))
    name, full_name, key = (text(found.get(tag, memoryview(b"")), GRAPH) for tag in (1, 2, 3))
    return Attribute(name=name, full_name=full_name, key=key)


def _parse_slot(message: memoryview) -> Slot:
    original, name = _numbered(message, 1, 2)
    return Slot(original=original, name=name, slot=_numbered(message, 3, 2)[0])


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _of_attribute(path: str, attribute: Attribute) -> str:
    return path if attribute.name == VALUE else _joined(path, attribute.name)


def _shown(path: str, attribute: Attribute) -> str:
    """Return the path itself, or the variable's own name after its part if what is between is private."""
    part, *between, last = path.split("/") if "/" in path else ("", path)
    if any(map(is_private, between)) and attribute.full_name:
        return _joined(part, attribute.full_name)
    return "/".join([part, *between, last.lstrip("_") or last]) if part else path


def is_private(component: str) -> bool:
    """Tell whether an object or a variable goes by a name that a library keeps for itself."""
    return component.startswith("_")


def walk(graph: ObjectGraph, root: int = 0) -> Iterator[tuple[str, int]]:
    """Yield each object once, with its shortest path from `root`."""
    seen, waiting = {root}, [("", root)]
    for path, current in waiting:
        yield path, current
        for name, child in graph.nodes[current].children.items():
            if child not in seen and len(path) + len(name) < _LONGEST_PATH:
                seen.add(child)
                waiting.append((_joined(path, name), child))
