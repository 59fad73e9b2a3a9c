"""What a TensorFlow checkpoint says beside its tensors: counters, rates and what optimizers keep."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from unbroken.errors import DamagedError, StorageError
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import ObjectGraph, walk

_FORMS = {
    "I64": "<q",
    "I32": "<i",
    "U64": "<Q",
    "U32": "<I",
    "F32": "<f",
    "F64": "<d",
    "F16": "<e",
    "BOOL": "<?",
}
_MOST_VALUES = 200
_LONGEST_VALUE_BYTES = 4096
_COUNTS = frozenset({"_iterations", "iterations", "iter"})
_RATES = ("learning_rate", "_learning_rate")
_VARIABLES = "_trainable_variables"
# What optimizers of TensorFlow 1 put after the name of the variable that they keep something for.
_SUFFIXES = frozenset({"Adam", "Adam_1", "Momentum", "Adagrad", "RMSProp", "RMSProp_1", "Ftrl", "Ftrl_1"})


def values_in(bundle: TfBundle, keys: Mapping[str, str], strings: Mapping[str, str]) -> dict[str, Any]:
    """Return what a bundle holds, nested by paths: single numbers and short texts as they are.

    `keys` are of the tensors of numbers by their paths, `strings` of those of strings.
    """
    found: dict[str, Any] = {}
    left = _MOST_VALUES
    for path, key in (*keys.items(), *strings.items()):
        value: Any = {"$tensor": path}
        is_short = bundle.entries[key].stored_bytes <= _LONGEST_VALUE_BYTES
        if left and is_short and (path in strings or not bundle.entries[key].shape):
            left -= 1
            # What is damaged is found by `verify`.
            with suppress(DamagedError, StorageError):
                value = _texts(bundle, key) if path in strings else _number(bundle, key, value)
        if path in keys or value != {"$tensor": path}:
            _put(found, path.split("/"), value)
    return found


def _texts(bundle: TfBundle, key: str) -> Any:
    texts = [text.decode("utf-8", "backslashreplace") for text in bundle.strings(key)]
    return texts if bundle.entries[key].shape else texts[0]


def _number(bundle: TfBundle, key: str, other: Any) -> Any:
    form = _FORMS.get(bundle.entries[key].dtype)
    return struct.unpack(form, bundle.read(key))[0] if form is not None else other


def optimizers(graph: ObjectGraph, keys: Mapping[str, str], values: Any) -> list[dict[str, Any]]:
    """Return the optimizers among the objects, as `roles.optimizers` does for other formats."""
    return [
        _optimizer(graph, path, number, values)
        for path, number in walk(graph)
        if _is_optimizer(graph, number)
    ]


def named_optimizers(keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the optimizer that a checkpoint of names holds, told by what its variables are called."""
    kept = [
        (base, suffix)
        for base, _, suffix in (path.rpartition("/") for path in keys)
        if suffix in _SUFFIXES and base in keys
    ]
    if not kept:
        return []
    parameters = {base for base, _ in kept}
    return [_described("(names)", len(parameters), [], sorted({suffix for _, suffix in kept}))]


def _put(found: dict[str, Any], components: list[str], value: Any) -> None:
    for component in components[:-1]:
        inner = found.setdefault(component, {})
        if not isinstance(inner, dict) or "$tensor" in inner:
            return
        found = inner
    if "$tensor" not in found:
        found.setdefault(components[-1], value)


def _is_optimizer(graph: ObjectGraph, number: int) -> bool:
    node = graph.nodes[number]
    return bool(node.slots) or (
        bool(_COUNTS & node.children.keys()) and bool(node.children.keys() & {*_RATES, _VARIABLES})
    )


def _optimizer(graph: ObjectGraph, path: str, number: int, values: Any) -> dict[str, Any]:
    node = graph.nodes[number]
    slots = {slot.name for slot in node.slots}
    originals = {slot.original for slot in node.slots}
    lists = dict(_lists(graph, number))
    parameters = lists.pop(_VARIABLES, len(originals))
    moments = sorted(slots | {name.strip("_") for name, count in lists.items() if count == parameters})
    rate = _value(values, f"{path}/learning_rate")
    rates = [rate] if isinstance(rate, float) else []
    return _described(path, parameters, rates, moments if parameters else [])


def _lists(graph: ObjectGraph, number: int) -> Iterator[tuple[str, int]]:
    """Yield the lists of variables that an object has, and how long they are."""
    for name, child in graph.nodes[number].children.items():
        inner = graph.nodes[child].children
        if name.startswith("_") and name != "_variables" and inner and all(key.isdecimal() for key in inner):
            yield name, len(inner)


def _value(values: Any, path: str) -> Any:
    for component in path.split("/"):
        values = values.get(component) if isinstance(values, dict) else None
    return values


def _described(where: str, parameters: int, rates: list[float], moments: list[str]) -> dict[str, Any]:
    return {
        "where": where,
        "groups": 1,
        "parameters": parameters,
        "learning_rates": rates,
        "states": parameters if moments else 0,
        "moments": moments,
    }
