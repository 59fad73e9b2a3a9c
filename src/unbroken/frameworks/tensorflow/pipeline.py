"""The stages of a tf.data pipeline: what each is, what it is set to, and what in it has no state to keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import script_ops

_SEED_OF_SHUFFLE = "DummySeedGenerator"
# Their own state is that of what they call.
_CALLS = frozenset({"StatefulPartitionedCall", "If", "While", "Case"})
_PYTHON_OPS = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})
_SEEDS = frozenset({"seed", "seed2"})
_DEEPEST = 4


class Stage:
    """One dataset of a pipeline, by a name such as `batch`, or `dataset.range` where data come from."""

    def __init__(self, dataset: Any, name: str, inputs: list[Stage]) -> None:
        self.dataset = dataset
        self.name = name
        self.inputs = inputs
        self.functions = [function.function for function in dataset._functions()]
        self.nodes = _nodes(self.functions)

    def value(self, attribute: str) -> Any:
        """Return a setting as a plain value, None if there is no such one."""
        found = getattr(self.dataset, attribute, None)
        return found.numpy() if isinstance(found, tf.Tensor) else found

    @property
    def seeds(self) -> tuple[int, int] | None:
        """What its random numbers begin with, None if it draws none."""
        return None if self.value("_seed") is None else (int(self.value("_seed")), int(self.value("_seed2")))

    @property
    def draws_anew(self) -> bool:
        """Whether each iterator over it draws other numbers than the one before."""
        changes = self.value("_reshuffle_each_iteration") or self.value("_rerandomize")
        return self.seeds is not None and (bool(changes) or self.seeds == (0, 0))


class Pipeline:
    """The stages of `dataset`, from where data come to where batches leave."""

    def __init__(self, dataset: Any) -> None:
        self._by_dataset: dict[int, Stage] = {}
        self._names: dict[str, int] = {}
        self.last = self._add(dataset)
        self.stages = list(self._by_dataset.values())

    def _add(self, dataset: Any) -> Stage:
        if id(dataset) not in self._by_dataset:
            inputs = [self._add(found) for found in dataset._inputs()]
            stage = Stage(dataset, self._name(dataset, is_source=not inputs), inputs)
            self._by_dataset[id(dataset)] = stage
        return self._by_dataset[id(dataset)]

    def _name(self, dataset: Any, *, is_source: bool) -> str:
        words = re.sub(r"(Dataset)?(V\d)?$", "", type(dataset).__name__.strip("_"))
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
        name = f"dataset.{name}" if is_source else name
        self._names[name] = number = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    @cached_property
    def lives_on(self) -> bool:
        """Whether the next iterator may give other batches than this one, or the same ones by a cache."""
        return any(
            stage.draws_anew or stage.value("_filename") is not None or _captures_datasets(stage)
            for stage in self.stages
        )

    @cached_property
    def draws_at_begin(self) -> bool:
        """Whether it matters in which order iterators are made."""
        return any(stage.draws_anew or _captures_datasets(stage) for stage in self.stages)

    @cached_property
    def draws_inside(self) -> bool:
        """Whether an iterator may draw once more after it was made, where something in it begins again."""
        begins_again = any(stage.name.startswith("repeat") for stage in self.stages)
        # Made while its file is not complete, an iterator over a cache would write the file once more.
        writes_file = any(stage.value("_filename") for stage in self.stages if stage.name.startswith("cache"))
        return self.draws_at_begin and (
            begins_again or writes_file or any(map(_captures_datasets, self.stages))
        )

    @cached_property
    def caches_in_memory(self) -> bool:
        """Whether what was read once is kept for the passes that follow."""
        return any(stage.name.startswith("cache") and not stage.value("_filename") for stage in self.stages)

    def python_functions(self) -> dict[str, Any]:
        """Return the functions of Python that it calls, by where."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            for node in stage.nodes:
                if node.op in _PYTHON_OPS:
                    for function in _of_user(_registered(node), 0):
                        found.setdefault(f"{stage.name}[{len(found)}]", function)
        return found

    def lacks(self) -> str | None:
        """Return why there is no state of an iterator to go on from, as far as that shows beforehand."""
        calling = [stage.name for stage in self.stages if _PYTHON_OPS & {node.op for node in stage.nodes}]
        if calling:
            return f"{', '.join(calling)} calls Python"
        # Restored where one of them has ended, it would wait for that one without end.
        forgets = [stage.name for stage in self.stages if _draws_from_some_that_end(stage)]
        return f"that of {', '.join(forgets)} leaves out which datasets have ended" if forgets else None

    @property
    def has_shuffles_inside(self) -> bool:
        """Whether functions of it make shuffles, and nothing else that has a state."""
        stateful = {node.op for stage in self.stages for node in stage.nodes if _is_stateful(node.op)}
        return _SEED_OF_SHUFFLE in stateful and all(
            op == _SEED_OF_SHUFFLE or op in _CALLS or re.search(r"Dataset(V\d)?$", op) for op in stateful
        )

    def hazards(self) -> list[str]:
        """Return what no state and no reading again brings back, in words."""
        found = []
        for stage in self.stages:
            if stage.draws_anew and stage.seeds == (0, 0):
                found.append(
                    f"{stage.name} has no seed: after a resume it goes on as it was until the end of what it "
                    "shuffles, and is another one when it begins anew. Give it a seed, or call "
                    "tf.random.set_seed before the pipeline is built"
                )
            if str(stage.value("_deterministic")) in ("false", "False"):
                found.append(f"{stage.name} has deterministic=False: its order depends on timing")
            if stage.name.startswith("data_service"):
                found.append(f"{stage.name}: the order in which a service gives batches depends on timing")
            later = stage.inputs[1:] if stage.name.startswith("concatenate") else []
            found += [
                f"{inner.name} comes second in {stage.name}: after a resume it may have another order when "
                "it begins anew. Shuffle what concatenate() gives"
                for second in later
                for inner in _below(second)
                if inner.draws_anew
            ]
        if self.last.dataset.options().deterministic is False:
            found.append("its options say deterministic=False: the order depends on timing")
        return found

    def unrepeatable(self) -> list[str]:
        """Return the random operations in its functions that draw other numbers each time they begin."""
        found = []
        for stage in self.stages:
            of_stage = {node.op: node for node in stage.nodes if {*node.attr} >= _SEEDS}
            unseeded = [op for op, node in of_stage.items() if not any(node.attr[key].i for key in _SEEDS)]
            if unseeded:
                found.append(f"{', '.join(unseeded)} in {stage.name} without a seed")
            elif of_stage and stage.name.startswith("parallel"):
                found.append(f"{', '.join(of_stage)} in {stage.name}, whose calls draw in any order")
            found += [f"{node.op} in {stage.name}" for node in stage.nodes if node.op == "RngReadAndSkip"]
        return found


def _nodes(functions: list[Any]) -> list[Any]:
    """Return the operations in functions, with those in the functions that these call."""
    graphs = [function.graph.as_graph_def() for function in functions]
    inner = [part for graph in graphs for part in graph.library.function]
    found = [node for graph in graphs for node in graph.node]
    return found + [node for part in inner for node in part.node_def]


def _is_stateful(op: str) -> bool:
    definition = op_def_registry.get(op)
    return definition is not None and bool(definition.is_stateful)


def _below(stage: Stage) -> Iterator[Stage]:
    yield stage
    for found in stage.inputs:
        yield from _below(found)


def _draws_from_some_that_end(stage: Stage) -> bool:
    drawn = getattr(stage.dataset, "_data_inputs", ())
    return any(int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY for dataset in drawn)


def _captures_datasets(stage: Stage) -> bool:
    return any(
        tensor.dtype == tf.variant for function in stage.functions for tensor in function.captured_inputs
    )


def _registered(node: Any) -> Any:
    return script_ops._py_funcs._funcs.get(node.attr["token"].s.decode())


def _of_user(value: Any, depth: int) -> Iterator[Any]:
    """Yield the functions of the user in `value`, which TensorFlow has wrapped."""
    if value is None or depth > _DEEPEST:
        return
    for name in ("_func", "_generator", "__wrapped__"):
        if name in getattr(value, "__dict__", {}):
            yield from _of_user(getattr(value, name), depth + 1)
            return
    module = getattr(value, "__module__", None) or ""
    if callable(value) and module.partition(".")[0] not in ("tensorflow", "keras"):
        yield value
        return
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # not assigned yet
            yield from _of_user(cell.cell_contents, depth + 1)
