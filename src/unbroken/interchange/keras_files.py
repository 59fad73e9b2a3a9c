"""What Keras keeps in HDF5: which array is which variable. Configurations are only read."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unbroken.interchange.files import damaged
from unbroken.interchange.hdf5 import Hdf5File

CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
MODEL, OPTIMIZER = "model", "optimizer"
_VARIABLE = re.compile(r"(?:(.*)/)?vars/(\d{1,9})")
_LARGEST_CONFIG_BYTES = 256 << 20
_MOST_NAMED = 100
# Variables have numbers in a file of weights. These are the names, in their order, by which Keras' own layers
# call them, for the class in a path and how many the layer has.
_KERNEL_AND_BIAS = {1: ("kernel",), 2: ("kernel", "bias")}
_CELL = {2: ("kernel", "recurrent_kernel"), 3: ("kernel", "recurrent_kernel", "bias")}
_SCALED = {2: ("gamma", "beta")}
_MOVING = ("moving_mean", "moving_variance")
_ROLES: dict[str, Mapping[int, tuple[str, ...]]] = {
    **dict.fromkeys(("dense", "einsum_dense", "conv1d", "conv2d", "conv3d"), _KERNEL_AND_BIAS),
    **dict.fromkeys(("conv1d_transpose", "conv2d_transpose", "conv3d_transpose"), _KERNEL_AND_BIAS),
    **dict.fromkeys(("depthwise_conv1d", "depthwise_conv2d"), _KERNEL_AND_BIAS),
    **dict.fromkeys(("lstm_cell", "gru_cell", "simple_rnn_cell"), _CELL),
    **dict.fromkeys(("layer_normalization", "group_normalization"), _SCALED),
    "batch_normalization": {2: _MOVING, 4: ("gamma", "beta", *_MOVING)},
    "embedding": {1: ("embeddings",)},
    "normalization": {3: ("mean", "variance", "count")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The variables in a file: `paths` of their arrays by the names `model/...` and `optimizer/...`.

    `form` is "weights" for a `.weights.h5`, "legacy" for an `.h5` as Keras 2 wrote it, "plain" for neither.
    `layers` are the names of layers by their paths, `facts` what the file says of itself, `config` the
    configuration of the model, None if there is none.
    """

    form: Literal["weights", "legacy", "plain"]
    paths: dict[str, str]
    layers: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    config: Any = None


def contents(file: Hdf5File) -> Contents:
    """Return which variable each array of a file is. Raises DamagedError."""
    for place in ("", "model_weights"):
        if "layer_names" in file.attributes.get(place, {}):
            return _legacy(file, place)
    if any(_VARIABLE.fullmatch(path) for path in file.arrays):
        return _weights(file)
    return Contents(form="plain", paths={path: path for path in file.arrays})


def model_weights(found: Contents) -> dict[str, str]:
    """Return the paths of the arrays that are weights of the model, by their names without `model/`."""
    if found.form == "plain":
        return found.paths
    start = f"{MODEL}/"
    return {name.removeprefix(start): path for name, path in found.paths.items() if name.startswith(start)}


def config_of(data: bytes | bytearray) -> Any:
    """Return a configuration as plain values. Raises ValueError."""
    if len(data) > _LARGEST_CONFIG_BYTES:
        raise ValueError(f"a configuration of {len(data)} bytes")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("a configuration that nests too deep") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """What a configuration names: layers that hold code, and classes that are none of Keras'."""

    lambdas: tuple[str, ...]
    strangers: tuple[str, ...]


def classes_in(config: Any) -> Classes:
    """Return what of a configuration would run code, were it made into objects."""
    lambdas, strangers, has_code = [], set(), False
    for item in _objects(config):
        name, module = str(item.get("class_name")), item.get("module")
        inner = item.get("config")
        has_code |= name == "__lambda__"
        if name == "Lambda":
            lambdas.append(str(inner.get("name", name)) if isinstance(inner, dict) else name)
        if isinstance(module, str) and module.partition(".")[0] not in ("keras", "builtins"):
            strangers.add(f"{module}.{name}")
        elif module is None and item.get("registered_name"):
            strangers.add(str(item["registered_name"]))
    if has_code and not lambdas:
        lambdas = ["a function in a configuration"]
    return Classes(lambdas=tuple(lambdas[:_MOST_NAMED]), strangers=tuple(sorted(strangers)[:_MOST_NAMED]))


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    waiting = [config]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if "class_name" in item:
                yield item
            waiting.extend(reversed(item.values()))
        elif isinstance(item, list):
            waiting.extend(reversed(item))


def _weights(file: Hdf5File) -> Contents:
    owners: dict[str, list[tuple[int, str]]] = defaultdict(list)
    paths: dict[str, str] = {}
    for path in file.arrays:
        found = _VARIABLE.fullmatch(path)
        if found is None:
            # Keras looks for nothing there.
            paths[path] = path
        else:
            owners[found[1] or ""].append((int(found[2]), path))
    for owner, variables in owners.items():
        variables.sort()
        is_model = owner.partition("/")[0] != OPTIMIZER
        roles = _roles(file, owner, [path for _, path in variables])
        for (number, path), role in zip(variables, roles, strict=True):
            below = "/".join(filter(None, (owner, role or str(number))))
            paths[f"{MODEL}/{below}" if is_model else below] = path
    layers = {
        place.removesuffix("/vars"): str(attributes["name"])
        for place, attributes in file.attributes.items()
        if place.endswith("/vars") and "name" in attributes
    }
    return Contents(form="weights", paths=paths, layers=layers)


def _roles(file: Hdf5File, owner: str, paths: Sequence[str]) -> Sequence[str]:
    """Return what the variables of `owner` are called, an empty text for those that only have a number."""
    if owner.partition("/")[0] == OPTIMIZER:
        return [_optimizer_role(file, path) for path in paths]
    kind = re.sub(r"_\d+$", "", owner.rpartition("/")[2])
    return _ROLES.get(kind, {}).get(len(paths), [""] * len(paths))


def _optimizer_role(file: Hdf5File, path: str) -> str:
    number, array = path.rpartition("/")[2], file.arrays[path]
    if number == "0" and array.kind.dtype in ("I32", "I64") and array.shape == ():
        return "iteration"
    # With a schedule there is no such variable, and the next one has the shape of a parameter.
    return "learning_rate" if number == "1" and array.kind.dtype == "F32" and array.shape == () else ""


def _legacy(file: Hdf5File, place: str) -> Contents:
    facts = {
        name: value
        for at in ("", place)
        for name, value in file.attributes.get(at, {}).items()
        if name in ("keras_version", "backend")
    }
    config = file.attributes.get("", {}).get("model_config")
    paths = dict(_named(file, place, MODEL))
    if place:
        paths |= dict(_named(file, "optimizer_weights", OPTIMIZER))
    # What no list of names tells of is there all the same.
    told = set(paths.values())
    paths |= {path: path for path in file.arrays if path not in told}
    return Contents(
        form="legacy",
        paths=paths,
        layers={name: name for name in _texts(file.attributes.get(place, {}).get("layer_names"))},
        facts=facts,
        config=_config_in(file, config) if isinstance(config, str) else None,
    )


def _config_in(file: Hdf5File, config: str) -> Any:
    try:
        return config_of(config.encode())
    except ValueError as error:
        raise damaged(file.where, "a configuration in JSON", str(error)) from error


def _named(file: Hdf5File, place: str, part: str) -> Iterator[tuple[str, str]]:
    """Yield the names of variables, as the lists of names in a file give them, with the paths."""
    found = []
    for group, attributes in file.attributes.items():
        if group == place or group.startswith(f"{place}/" if place else ""):
            for name in _texts(attributes.get("weight_names")):
                path = f"{group}/{name}" if group else name
                if path in file.arrays:
                    found.append((group.removeprefix(place).strip("/"), name, path))
    counts = Counter(name for _, name, _ in found)
    for layer, name, path in found:
        # Layers of nested models may call their variables alike.
        yield f"{part}/{name if counts[name] == 1 else f'{layer}/{name}'}", path


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
