"""What tells one tf.data pipeline from another: its stages, and what each is set to. No element is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from blake3 import blake3

from unbroken.errors import StateMismatchError
from unbroken.frameworks.tensorflow.pipeline import Pipeline, Stage

_PLAIN = (str, bytes, int, float, bool)
_MOST_BYTES = 4096
_MOST_VALUES = 16
# What changes how fast batches come, not which; names that users give; and what is kept aside.
_LEFT_OUT = frozenset(
    {
        "_num_parallel_calls",
        "_use_inter_op_parallelism",
        "_use_unbounded_threadpool",
        "_force_synchronous",
        "_name",
        "_seed",
        "_seed2",
        "_filename",
    }
)


def fingerprint(pipeline: Pipeline) -> dict[str, object]:
    """Return what must be the same for a resume to be exact, as plain values by their place."""
    last = pipeline.last.dataset
    return {
        "pipeline": " -> ".join(stage.name for stage in pipeline.stages),
        "element_spec": repr(last.element_spec),
        "dataset_length": int(last.cardinality()),
        **{f"{stage.name}.{name}": value for stage in pipeline.stages for name, value in _of_stage(stage)},
    }


def seeds(pipeline: Pipeline) -> dict[str, list[int]]:
    """Return the seeds of its shuffles."""
    return {stage.name: [*stage.seeds] for stage in pipeline.stages if stage.seeds is not None}


def check_same_pipeline(saved: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Raise StateMismatchError, naming every difference, for another pipeline."""
    differences = [
        f"{name}: the checkpoint has {saved.get(name)!r}, found {found.get(name)!r}"
        for name in [*saved, *(name for name in found if name not in saved)]
        if saved.get(name) != found.get(name)
    ]
    if differences:
        raise StateMismatchError(
            "batches: another tf.data pipeline: " + "; ".join(differences),
            hint="resume with the pipeline of the original run or, if nothing of it lasts from one epoch to "
            "the next, from a checkpoint between two, or start a new run directory",
        )


def _of_stage(stage: Stage) -> Iterator[tuple[str, object]]:
    for attribute, value in vars(stage.dataset).items():
        is_of_speed = attribute == "_buffer_size" and stage.name.startswith("prefetch")
        if attribute in _LEFT_OUT or is_of_speed:
            continue
        several = value if isinstance(value, list | tuple) else [value]
        for number, item in enumerate(several):
            if isinstance(item, tf.Tensor) and item.dtype not in (tf.variant, tf.resource):
                place = f"[{number}]" if several is value else ""
                yield attribute.strip("_") + place, _of_tensor(item)
        if isinstance(value, _PLAIN):
            yield attribute.strip("_"), value if not isinstance(value, bytes) else _tail(value)
    for number, function in enumerate(stage.functions):
        yield f"function[{number}]", _of_function(function)


def _of_tensor(tensor: Any) -> object:
    if tensor.dtype != tf.string and tensor.shape.num_elements() <= _MOST_VALUES:
        return str(tensor.numpy().tolist())
    rows = [tensor] if not tensor.shape.rank else [tensor[place] for place in _places(len(tensor))]
    digest = blake3()
    for row in rows:
        digest.update(_row_bytes(row) + b"\0")
    return f"{tensor.dtype.name}{tensor.shape.as_list()} {digest.hexdigest()[:12]}"


def _places(length: int) -> tuple[int, ...]:
    return (0, length // 2, length - 1) if length else ()


def _row_bytes(row: Any) -> bytes:
    flat = tf.reshape(row, [-1])[:_MOST_BYTES].numpy()
    if row.dtype != tf.string:
        found: bytes = flat.tobytes()
        return found[:_MOST_BYTES]
    return b"\0".join(map(_tail, flat.tolist()))[:_MOST_BYTES]


def _tail(text: bytes) -> bytes:
    # The same files may lie in another directory of another machine.
    return b"/".join(text.replace(b"\\", b"/").rsplit(b"/", 2)[-2:])


def _of_function(function: Any) -> str:
    """Return a digest of the operations; the names that TensorFlow numbers differ in each process."""
    graph = function.graph.as_graph_def()
    bodies = sorted(" ".join(node.op for node in part.node_def) for part in graph.library.function)
    text = "\n".join([" ".join(node.op for node in graph.node), *bodies])
    return f"{len(graph.node)} operations {blake3(text.encode()).hexdigest()[:12]}"
