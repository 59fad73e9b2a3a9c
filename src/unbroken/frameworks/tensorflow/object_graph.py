"""Live objects beside those that a TensorFlow checkpoint was made of: which variable there is which here.

Both are walked by the same names, as TensorFlow does; unlike there everything is looked at before anything is
set, and what has no partner on either side is named.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from unbroken.frameworks.tensorflow.distributed import is_variable
from unbroken.frameworks.tensorflow.keras2 import name_there, numbered_layers, setting_here, slots_here
from unbroken.frameworks.tensorflow.tensors import TfTensor, assign_value, numpy_dtype
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import VALUE, ObjectGraph
from unbroken.state.handlers import Difference

# Lists in which an optimizer has, in the order they were made, its own variables, and those that it trains.
_OWN_LISTS = frozenset({"_variables", "_all_variables"})
_TRAINED = "_trainable_variables"
# Every checkpoint counts how often it was saved, which means nothing to training.
_IGNORED_PARTS = frozenset({"save_counter"})


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

    `others` are the names of those that are no part here.
    """

    def __init__(
        self,
        bundle: TfBundle,
        graph: ObjectGraph,
        parts: Mapping[str, object],
        roots: Mapping[str, int],
    ) -> None:
        self._bundle, self._graph = bundle, graph
        self.others = [name for name in roots if name not in parts and name not in _IGNORED_PARTS]
        self.parts = {name: Matched() for name in parts}
        # Which of the two sides has been given a partner: by the node, and by the variable.
        self._live_of: dict[int, Any] = {}
        self._node_of: dict[int, int] = {}
        self._trained: list[tuple[str, str, Any, int]] = []
        present = {name: (value, roots[name]) for name, value in parts.items() if name in roots}
        for name in parts.keys() - present.keys():
            self.parts[name].differences.append(Difference("missing", "", "the checkpoint lacks this part"))
        for may_follow in (_is_no_list, _is_own):
            for name, (value, node) in present.items():
                self._walk(name, value, node, may_follow)
        for name, (value, node) in present.items():
            for slot, variable, at in slots_here(value, graph, node, self._live_of):
                self._pair(name, slot, variable, at)
            self._compare_settings(name, value, node)
        self._check_trained()
        for name, (value, node) in present.items():
            self._note_unpaired(name, value, node)

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

    def _walk(self, part: str, value: object, node: int, may_follow: Callable[[str], bool]) -> None:
        # Kept, so that no other object gets the identity of one that was met.
        seen: dict[tuple[int, int], object] = {}
        waiting = deque([("", value, node)])
        while waiting:
            name, live, at = waiting.popleft()
            if (id(live), at) in seen:
                continue
            seen[id(live), at] = live
            variable = variable_of(live)
            if variable is not None:
                self._pair(part, name, variable, at)
                continue
            there = self._graph.nodes[at].children
            waiting.extend(
                (_joined(name, child), layer, inner) for child, layer, inner in numbered_layers(live, there)
            )
            for child, inner in children_of(live).items():
                called = name_there(child, there)
                if called is None:
                    continue
                if child == _TRAINED:
                    self._trained += self._in_list(part, name, inner, there[called])
                elif may_follow(child):
                    waiting.append((_joined(name, child), inner, there[called]))

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
        self.parts[part].pairs.append(Pair(name, key, variable))
        self.parts[part].differences += self._against(name, variable, key)
        if _is_in_own_list(name):
            self.parts[part].differences += self._other_kind(name, variable, node)

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
            if there.tolist() != [there.dtype.type(here)]:
                text = f"it is {there.tolist()[0]:g} in the checkpoint, {here:g} here"
                self.parts[part].differences.append(Difference("unexpected", name, text))

    def _in_list(self, part: str, name: str, live: object, node: int) -> Iterator[tuple[str, str, Any, int]]:
        there = self._graph.nodes[node].children
        for child, inner in children_of(live).items():
            variable = variable_of(inner)
            if variable is not None and child in there:
                yield part, f"{_joined(name, _TRAINED)}.{child}", variable, there[child]

    def _check_trained(self) -> None:
        """Note where an optimizer trains other variables at a place than it did: slots go by that place."""
        for part, name, variable, node in self._trained:
            known = self._live_of.get(node)
            if known is not None and known is not variable:
                text = "another variable stands here than in the checkpoint: the order has changed"
                self.parts[part].differences.append(Difference("other", name, text))

    def _note_unpaired(self, part: str, value: object, node: int) -> None:
        found = self.parts[part].differences
        for name, variable in live_variables(value):
            if id(variable) not in self._node_of:
                found.append(Difference("missing", name, "the checkpoint lacks it"))
        for path, at in self._nodes_below(node):
            for attribute in self._graph.nodes[at].attributes:
                if at not in self._live_of and attribute.key in self._bundle.entries:
                    called = f" ({attribute.full_name})" if attribute.full_name else ""
                    found.append(Difference("unexpected", path, f"the program lacks it{called}"))

    def _nodes_below(self, root: int) -> Iterator[tuple[str, int]]:
        seen, waiting = {root}, deque([("", root)])
        while waiting:
            path, current = waiting.popleft()
            yield path, current
            node = self._graph.nodes[current]
            inner = [(child, at) for child, at in node.children.items() if child != _TRAINED]
            # What Keras 2 kept for a variable, beside the children of its optimizer.
            inner += [(f"{slot.name}.{slot.original}", slot.slot) for slot in node.slots]
            for child, at in inner:
                if at not in seen:
                    seen.add(at)
                    waiting.append((_joined(path, child), at))


def children_of(value: object) -> Mapping[str, Any]:
    """Return what TensorFlow would save below an object, by its names there."""
    try:
        found: Mapping[str, Any] = tf.train.TrackableView.children(value)
    except (AttributeError, TypeError, ValueError):
        # No object that TensorFlow could keep.
        return {}
    return found


def variable_of(value: Any) -> Any:
    """Return the variable that `value` is, or is Keras' name for; None if it is none."""
    if is_variable(value):
        return value
    inner = getattr(value, "value", None)
    return inner if not callable(inner) and is_variable(inner) else None


def live_variables(value: object) -> list[tuple[str, Any]]:
    """Return the variables below an object, each once, by the shortest way; not what it trains."""
    found: list[tuple[str, Any]] = []
    seen: dict[int, object] = {}
    waiting = deque([("", value)])
    while waiting:
        name, live = waiting.popleft()
        variable = variable_of(live)
        key = id(live if variable is None else variable)
        if key in seen:
            continue
        seen[key] = live
        if variable is not None:
            found.append((name, variable))
            continue
        inner = [(child, item) for child, item in children_of(live).items() if child != _TRAINED]
        waiting.extend((_joined(name, child), item) for child, item in sorted(inner, key=_lists_last))
    return found


def _lists_last(item: tuple[str, Any]) -> bool:
    return item[0] in _OWN_LISTS


def _is_no_list(child: str) -> bool:
    return child not in _OWN_LISTS


def _is_own(child: str) -> bool:
    return True


def _kind_in(full_name: str) -> str:
    """Return the class, without its number, that Keras puts before what an optimizer calls its variables."""
    return re.sub(r"_\d+$", "", full_name.partition("/")[0])


def _is_in_own_list(name: str) -> bool:
    return not _OWN_LISTS.isdisjoint(name.split("."))


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def names_in_graph(
    model: object, named: Mapping[str, Any], bundle: TfBundle, graph: ObjectGraph, node: int
) -> dict[str, str]:
    """Return, by the keys of what fits `model` where it is the object `node`, what `named` calls that.

    It is empty for what belongs to the model and is not among those.
    """
    names = {id(variable_of(variable)): name for name, variable in named.items()}
    match = ObjectMatch(bundle, graph, {"": model}, {"": node})
    return {pair.key: names.get(id(pair.variable), "") for pair in match.parts[""].pairs}
