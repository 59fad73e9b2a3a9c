"""Live objects beside those that a TensorFlow checkpoint was made of: which variable there is which here.

Both are walked by the same names, as TensorFlow does; unlike there everything is looked at before anything is
set, and what has no partner on either side is named.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unbroken.frameworks.dtypes import numpy_dtype
from unbroken.frameworks.tensorflow.content import content_of
from unbroken.frameworks.tensorflow.distributed import assign_value
from unbroken.frameworks.tensorflow.keras2 import name_there, numbered_layers, setting_here, slots_here
from unbroken.frameworks.tensorflow.live_objects import (
    OWN_LISTS,
    TRAINED,
    children_of,
    joined,
    live_variables,
    variable_of,
)
from unbroken.frameworks.tensorflow.tensors import TfTensor
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import VALUE, ObjectGraph
from unbroken.state.handlers import Difference

# Every checkpoint counts how often it was saved, which means nothing to training.
_IGNORED_PARTS = frozenset({"save_counter"})
# Neither that, nor the states of seed generators, are looked for below parts.
_NEVER_KEPT = frozenset({"save_counter", "seed_generator_state"})


@dataclass(frozen=True, slots=True)
class Pair:
    """A variable here, called `name`, and the key that its value has there."""

    name: str
    key: str
    variable: Any


@dataclass(slots=True)
class Matched:
    """What of a checkpoint belongs to one part: the pairs, and each difference."""

    pairs: list[Pair] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


class ObjectMatch:
    """The objects of `parts` beside those of a checkpoint, whose children have the same names as the parts.

    Parts that are `fresh` are left alone, wherever they are met. What a part has is its own, also where
    another part holds it. `others` are the names of those that are no part here, `notes` say
    which numbers stay as the script set them, because `overrides` is true for them.
    """

    def __init__(
        self,
        bundle: TfBundle,
        graph: ObjectGraph,
        parts: Mapping[str, object],
        roots: Mapping[str, int],
        *,
        fresh: Collection[str] = (),
        overrides: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._bundle, self._graph, self._overrides = bundle, graph, overrides
        self.others = [name for name in roots if name not in parts and name not in _IGNORED_PARTS]
        self.parts = {name: Matched() for name in parts if name not in fresh}
        self.notes: list[str] = []
        self.has_optimizer = False
        self._values = parts
        self._names = {id(value): name for name, value in parts.items()}
        # The objects there that parts are, and those that fresh parts would be.
        self._roots = {name: roots[name] for name in self.parts if name in roots}
        self._fresh_nodes = {roots[name] for name in parts if name in fresh and name in roots}
        # Which of the two sides has been given a partner: by the node, and by the variable.
        self._live_of: dict[int, Any] = {}
        self._node_of: dict[int, int] = {}
        self._trained: list[tuple[str, str, Any, int]] = []
        for may_follow in (_is_no_list, _is_own):
            self._walk_all(may_follow)
        for name in self.parts.keys() - self._roots.keys():
            self.parts[name].differences.append(Difference("missing", "", "the checkpoint lacks this part"))
        for name, node in self._roots.items():
            for slot, variable, at in slots_here(parts[name], graph, node, self._live_of):
                self._pair(name, slot, variable, at)
            self._compare_settings(name, parts[name], node)
        self._check_trained()
        noted: set[int] = set()
        for name, node in self._roots.items():
            self._note_missing(name, noted)
            self._note_unexpected(name, node)

    def fitting(self, part: str) -> list[Pair]:
        """Return the pairs of a part whose values can be taken: not those of another shape."""
        apart = {item.name for item in self.parts[part].differences if item.kind != "dtype"}
        return [pair for pair in self.parts[part].pairs if pair.name not in apart]

    def fill(self) -> None:
        """Give the variables that fit their values, each in the dtype that it has here."""
        pairs = [pair for part in self.parts for pair in self.fitting(part)]
        # All are read, and held against their checksums, before the first is set.
        values = [self._value(pair) for pair in pairs]
        for pair, value in zip(pairs, values, strict=True):
            assign_value(pair.variable, value)

    def size_bytes(self, pair: Pair) -> int:
        """Return the size of what a variable gets."""
        return self._bundle.entries[pair.key].size_bytes

    def _value(self, pair: Pair) -> np.ndarray[Any, Any]:
        entry = self._bundle.entries[pair.key]
        found = np.frombuffer(self._bundle.read(pair.key), numpy_dtype(entry.dtype)).reshape(entry.shape)
        return found.astype(pair.variable.dtype.as_numpy_dtype, copy=False)

    def _walk_all(self, may_follow: Callable[[str], bool]) -> None:
        done: set[str] = set()
        # Parts that are met on the way are walked in their turn.
        while left := [name for name in self._roots if name not in done]:
            for name in left:
                self._walk(name, self._values[name], self._roots[name], may_follow)
            done.update(left)

    def _is_elsewhere(self, part: str, live: object, node: int) -> bool:
        """Tell whether `live` is another part than `part`; that it is `node` there is noted."""
        other = self._names.get(id(live), part)
        if other == part:
            return False
        if other in self.parts:
            self._roots.setdefault(other, node)
        else:
            self._fresh_nodes.add(node)
        return True

    def _walk(self, part: str, value: object, node: int, may_follow: Callable[[str], bool]) -> None:
        # Kept, so that no other object gets the identity of one that was met.
        seen: dict[tuple[int, int], object] = {}
        waiting = deque([("", value, node)])
        while waiting:
            name, live, at = waiting.popleft()
            if (id(live), at) in seen or (seen and self._is_elsewhere(part, live, at)):
                continue
            seen[id(live), at] = live
            variable = variable_of(live)
            if variable is not None:
                self._pair(part, name, variable, at)
                continue
            there = self._graph.nodes[at].children
            waiting.extend(
                (joined(name, child), layer, inner) for child, layer, inner in numbered_layers(live, there)
            )
            children = children_of(live)
            if TRAINED in children:
                self._compare_kind(part, name, children, there)
            for child, inner in children.items():
                called = name_there(child, there)
                if called is None:
                    continue
                if child == TRAINED and may_follow is _is_own:
                    self._trained += self._in_list(part, name, inner, there[called])
                elif child != TRAINED and may_follow(child):
                    waiting.append((joined(name, child), inner, there[called]))

    def _pair(self, part: str, name: str, variable: Any, node: int) -> None:
        key = self._key(node)
        known, other = self._live_of.get(node), self._node_of.get(id(variable))
        if key is None or known is variable:
            return
        if known is not None or other is not None:
            if _is_in_own_list(name):
                return
            text = (
                "one variable in the checkpoint and two here" if known is not None else "two there, one here"
            )
            self.parts[part].differences.append(Difference("other", name, text))
            return
        self._live_of[node], self._node_of[id(variable)] = variable, node
        if _is_rate(name) and self._overrides(_plain(part, name)):
            self.notes.append(f"{_plain(part, name)}: as the script set it, by override=")
            return
        self.parts[part].pairs.append(Pair(name, key, variable))
        self.parts[part].differences += self._against(name, variable, key)
        if _is_in_own_list(name):
            self.parts[part].differences += self._other_kind(name, variable, node)

    def _compare_kind(
        self, part: str, name: str, children: Mapping[str, Any], there: Mapping[str, int]
    ) -> None:
        """Note where an optimizer is of another class than there: its variables are called by it."""
        self.has_optimizer = True
        for child, inner in children.items():
            variable, node = variable_of(inner), there.get(child)
            if variable is None or node is None or not self._graph.nodes[node].attributes:
                continue
            before, here = self._graph.nodes[node].attributes[0].full_name, variable.name
            if "/" in before and "/" in here and _kind_in(before) != _kind_in(here):
                text = f"it is {_kind_in(before)} in the checkpoint, and {_kind_in(here)} here"
                difference = Difference("unexpected", name, text)
                if difference not in self.parts[part].differences:
                    self.parts[part].differences.append(difference)
                return

    def _other_kind(self, name: str, variable: Any, node: int) -> Iterator[Difference]:
        """Yield a difference where a place in a list is all that two variables of optimizers share."""
        there, here = self._graph.nodes[node].attributes[0].full_name, variable.name.rpartition(":")[0]
        if _kind_in(there) != _kind_in(here):
            yield Difference("unexpected", name, f"it is {there} in the checkpoint, and {here} here")

    def _against(self, name: str, variable: Any, key: str) -> Iterator[Difference]:
        entry, live = self._bundle.entries[key], TfTensor(variable)
        if entry.shape != live.shape:
            yield Difference("shape", name, f"shape {live.shape}, the checkpoint has shape {entry.shape}")
        if entry.dtype != live.dtype:
            yield Difference("dtype", name, f"dtype {live.dtype}, the checkpoint has dtype {entry.dtype}")

    def _key(self, node: int) -> str | None:
        keys = [found.key for found in self._graph.nodes[node].attributes if found.name == VALUE]
        return keys[0] if keys and keys[0] in self._bundle.entries else None

    def _compare_settings(self, part: str, value: object, node: int) -> None:
        """Look at the numbers that Keras 2 kept as variables and Keras 3 has by itself."""
        for name, at in self._graph.nodes[node].children.items():
            key, here = self._key(at), setting_here(value, name)
            if key is None or here is None or at in self._live_of or not self._graph.nodes[node].slots:
                continue
            there = np.frombuffer(self._bundle.read(key), numpy_dtype(self._bundle.entries[key].dtype))
            self._live_of[at] = value
            if self._overrides(_plain(part, name)):
                self.notes.append(f"{_plain(part, name)}: as the script set it, by override=")
            elif there.tolist() != [there.dtype.type(here)]:
                text = f"it is {there.tolist()[0]:g} in the checkpoint, {here:g} here"
                self.parts[part].differences.append(Difference("unexpected", name, text))

    def _in_list(self, part: str, name: str, live: object, node: int) -> Iterator[tuple[str, str, Any, int]]:
        there = self._graph.nodes[node].children
        for child, inner in children_of(live).items():
            variable = variable_of(inner)
            if variable is not None and child in there:
                yield part, f"{joined(name, TRAINED)}.{child}", variable, there[child]

    def _check_trained(self) -> None:
        """Note where an optimizer trains other variables at a place than it did: slots go by that place."""
        for part, name, variable, node in self._trained:
            known, other = self._live_of.get(node), self._node_of.get(id(variable))
            if known is None and other is None:
                text = "whether this is the variable that stands here in the checkpoint cannot be told"
                self.parts[part].differences.append(Difference("unexpected", name, text))
            elif known is not variable:
                text = "another variable stands here than in the checkpoint: the order has changed"
                self.parts[part].differences.append(Difference("other", name, text))

    def _note_missing(self, part: str, noted: set[int]) -> None:
        apart = {id(value) for name, value in self._values.items() if name != part}
        seen = live_variables(self._values[part], apart)
        unseen = self._unseen(part, {id(variable) for _, variable in seen})
        lacking = [(*item, "the checkpoint lacks it") for item in seen]
        lacking += [(*item, f"no object that TensorFlow saves leads to {item[1].name}") for item in unseen]
        for name, variable, text in lacking:
            if id(variable) not in self._node_of and id(variable) not in noted:
                noted.add(id(variable))
                self.parts[part].differences.append(Difference("missing", name, text))

    def _unseen(self, part: str, seen: Collection[int]) -> Iterator[tuple[str, Any]]:
        """Yield the variables of a part that TensorFlow saves for no object, as in a dictionary of layers."""
        mine = _all_below(self._values[part])
        fresh = [value for name, value in self._values.items() if name not in self.parts]
        theirs = {id(variable) for value in fresh for variable in _all_below(value).values()}
        if theirs.issuperset(map(id, mine.values())):
            # It is inside a fresh part.
            theirs = set()
        for name, variable in mine.items():
            is_kept = name.rpartition(".")[2] not in _NEVER_KEPT
            if is_kept and id(variable) not in seen and id(variable) not in theirs:
                yield name, variable

    def changed_rates(self) -> Iterator[str]:
        """Yield a line for each learning rate that will not be the one that the script set."""
        for part in self.parts:
            for pair in self.fitting(part):
                if not _is_rate(pair.name) or pair.variable.shape.rank != 0:
                    continue
                there, here = self._value(pair), pair.variable.numpy()
                if there != here:
                    text = f"{there:g} as in the checkpoint, the script set {here:g}"
                    yield f"{_plain(part, pair.name)}: {text}"

    def _note_unexpected(self, part: str, node: int) -> None:
        found = self.parts[part].differences
        for path, at in self._nodes_below(node):
            for attribute in self._graph.nodes[at].attributes:
                if at not in self._live_of and attribute.key in self._bundle.entries:
                    called = f" ({attribute.full_name})" if attribute.full_name else ""
                    found.append(Difference("unexpected", path, f"the program lacks it{called}"))

    def _nodes_below(self, root: int) -> Iterator[tuple[str, int]]:
        seen, waiting = {root, *self._fresh_nodes, *self._roots.values()}, deque([("", root)])
        while waiting:
            path, current = waiting.popleft()
            yield path, current
            node = self._graph.nodes[current]
            inner = [(child, at) for child, at in node.children.items() if child != TRAINED]
            # What Keras 2 kept for a variable, beside the children of its optimizer.
            inner += [(f"{slot.name}.{slot.original}", slot.slot) for slot in node.slots]
            for child, at in inner:
                if at not in seen:
                    seen.add(at)
                    waiting.append((joined(path, child), at))


def _all_below(value: object) -> Mapping[str, Any]:
    """Return every variable below an object, by whatever way it is held."""
    is_container = isinstance(value, dict | list | tuple) or hasattr(value, "__dict__")
    return content_of(value).variables if is_container and variable_of(value) is None else {}


def _is_no_list(child: str) -> bool:
    return child not in OWN_LISTS


def _is_own(child: str) -> bool:
    return True


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_") == "learning_rate"


def _plain(part: str, name: str) -> str:
    """Return what the user calls a setting, `optimizer.learning_rate`."""
    return ".".join([part, *(segment.lstrip("_") for segment in name.split("."))])


def _kind_in(full_name: str) -> str:
    """Return the class, without its number, that Keras puts before what an optimizer calls its variables."""
    return re.sub(r"_\d+$", "", full_name.partition("/")[0])


def _is_in_own_list(name: str) -> bool:
    return not OWN_LISTS.isdisjoint(name.split("."))


def names_in_graph(
    model: object, named: Mapping[str, Any], bundle: TfBundle, graph: ObjectGraph, node: int
) -> dict[str, str]:
    """Return, by the keys of what fits `model` where it is the object `node`, what `named` calls that.

    It is empty for what belongs to the model and is not among those.
    """
    names = {id(variable_of(variable)): name for name, variable in named.items()}
    match = ObjectMatch(bundle, graph, {"": model}, {"": node})
    return {pair.key: names.get(id(pair.variable), "") for pair in match.parts[""].pairs}
