"""Weights in files of Keras and TensorFlow, by every name that they may be meant by."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from unbroken.errors import UsageError
from unbroken.interchange import keras_files
from unbroken.interchange.files import RegularFile, damaged, unreadable
from unbroken.interchange.hdf5 import MAGIC, Hdf5File
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import VALUE, ObjectGraph, read_graph
from unbroken.interchange.tf_place import find_bundle
from unbroken.state.tensors import ITEM_BYTES, HostTensor
from unbroken.training.adaptation import Rename

_ZIP = b"PK\x03\x04"
_BROKEN_ZIP = (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)
_TRAINED = "_trainable_variables"
# An optimizer is an object with one of these.
_OF_OPTIMIZERS = frozenset({_TRAINED, "_learning_rate"})
# What savers by name keep for training, and for no model.
_NO_WEIGHTS = frozenset({"global_step", "beta1_power", "beta2_power", "save_counter"})


class Weights(Protocol):
    """The weights of a model by their names."""

    @property
    def tensors(self) -> Mapping[str, object]: ...


@runtime_checkable
class NamesFiles(Protocol):
    """Weights that know how Keras numbers them in a file."""

    def names_in_file(self) -> Mapping[str, str]:
        """Return the names of weights by their paths in a file, such as `layers/dense_1/vars/0`."""
        ...


@runtime_checkable
class NamesObjects(Protocol):
    """Weights of objects that TensorFlow can save."""

    def names_in_graph(self, bundle: TfBundle, graph: ObjectGraph, node: int) -> Mapping[str, str]:
        """Return, by keys, the names of what belongs to weights where object `node` is this model.

        The name is empty for what the model has and is no weight of it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """A tensor of a file: `spellings` are what it may be called, in the same order for all in the file.

    `key` is where it lies.
    """

    key: str
    load: Callable[[], HostTensor]
    spellings: tuple[str, ...]


Tensors = list[Spelled]
# By the names of the objects that have them, empty for all that the source holds.
Sources = list[tuple[str, Tensors]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What of a source a model has: `tensors` by its names, and `others` that it lacks."""

    where: str
    tensors: Mapping[str, HostTensor]
    others: tuple[str, ...]


def read_keras_or_tensorflow(
    path: Path, weights: Weights, part: str | None, new_name: Rename
) -> Fitting | None:
    """Return the weights in `path` by name, None if it is no file of either library.

    Of the spellings of names that one counts by which the model has most of them; what `new_name` changes
    goes before. Raises UsageError, DamagedError and StorageError.
    """
    found = _keras(path, weights, part) or _tensorflow(path, weights, part, new_name)
    if found is None:
        return None
    where, sources = found
    known = weights.tensors
    named = {
        source: max(
            (_named(tensors, style, new_name, where) for style in range(len(tensors[0].spellings))),
            key=lambda names: sum(name in known for name in names),
        )
        for source, tensors in sources
        if tensors
    }
    chosen = _best_of(named, known, where)
    best = named.get(chosen, {})
    return Fitting(
        where=f"{where} ({chosen})" if chosen else where,
        tensors={name: tensor.load() for name, tensor in best.items() if name in known},
        others=tuple(name for name in best if name not in known),
    )


def _best_of(named: Mapping[str, Mapping[str, Spelled]], known: Container[str], where: str) -> str:
    """Return of what the model has most tensors. Raises UsageError if several fit it alike."""
    fitting = {
        source: {(name, tensor.key) for name, tensor in tensors.items() if name in known}
        for source, tensors in named.items()
    }
    most = max(map(len, fitting.values()), default=0)
    best = [source for source, tensors in fitting.items() if len(tensors) == most]
    best.sort(key=lambda source: len(named[source]))
    if most and any(fitting[source] != fitting[best[0]] for source in best):
        raise UsageError(
            f"warm_start: {where}: expected part= to be one of {', '.join(filter(None, best))}, which fit "
            "the model alike, found none",
            hint="say which is meant",
        )
    return best[0] if best else ""


def _named(tensors: Tensors, style: int, new_name: Rename, where: str) -> dict[str, Spelled]:
    found: dict[str, Spelled] = {}
    usual = Counter(tensor.spellings[style] for tensor in tensors)
    for tensor in tensors:
        own = tensor.spellings[style]
        changed = _changed(tensor.spellings, new_name)
        name = changed[0] if changed else own if own and usual[own] == 1 else tensor.spellings[0]
        if name in found:
            raise UsageError(
                f"warm start from {where}: expected names that differ, found several tensors for {name}",
                hint="map each name to one of its own by rename=",
            )
        found[name] = tensor
    return found


def _changed(spellings: Iterable[str], new_name: Rename) -> list[str]:
    """Return what the rules of the user make of a name that is spelled like this."""
    return [new for name in spellings if name and (new := new_name(name)) != name]


def _spelled(path: str, *others: str) -> tuple[str, ...]:
    """Return the usual spellings of a name that is made of segments with slashes between."""
    bare = path.removesuffix(":0")
    return (path, f"{bare}:0" if bare == path else bare, bare.replace("/", "."), *others)


def _keras(path: Path, weights: object, part: str | None) -> tuple[str, Sources] | None:
    if not path.is_file():
        return None
    file = RegularFile(path)
    first = bytes(file.read(0, min(len(MAGIC), file.size_bytes)))
    if first == MAGIC:
        hdf5 = Hdf5File(file.read, file.size_bytes, str(path))
    elif first.startswith(_ZIP) and _is_keras_archive(path):
        data = _stored_weights(path)
        hdf5 = Hdf5File(lambda start, size: data[start : start + size], len(data), str(path))
    else:
        return None
    for place, problem in hdf5.problems:
        raise damaged(f"{path}: {place or '/'}", "a whole file", problem)
    _refuse(part, f"{path}, a file of Keras, which has one model")
    return str(path), [("", _weights_in(hdf5, weights, path))]


def _refuse(part: str | None, source: str) -> None:
    if part is not None:
        raise UsageError(
            f"warm_start: expected part= for a source with several, found it for {source}",
            hint="leave it out",
        )


def _weights_in(hdf5: Hdf5File, weights: object, path: Path) -> Tensors:
    names = weights.names_in_file() if isinstance(weights, NamesFiles) else {}
    found: Tensors = []
    tied: dict[str, Spelled] = {}
    for name, place in keras_files.model_weights(keras_files.contents(hdf5)).items():
        array = hdf5.arrays[place]

        def load(place: str = place) -> HostTensor:
            kind, shape = hdf5.arrays[place].kind, hdf5.arrays[place].shape
            data = hdf5.read(place)
            if kind.is_big_endian or kind.dtype is None:
                raise UsageError(
                    f"{path}: {place}: expected numbers with their lowest byte first, found others",
                    hint="`unbroken convert` makes a safetensors file of them",
                )
            return HostTensor(kind.dtype, shape, memoryview(data))

        if array.unread and array.kind.dtype is None:
            continue
        mine = names.get(place, "")
        tensor = Spelled(key=place, load=load, spellings=_spelled(name, mine))
        first = tied.setdefault(mine, tensor) if mine else tensor
        if first is tensor:
            found.append(tensor)
        elif bytes(first.load().data) != bytes(load().data):
            raise UsageError(
                f"{path}: expected {first.key} and {place}, one weight of the model, to be equal",
                hint="the model that it was made of had two; found are other bytes",
            )
    return found


def _is_keras_archive(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return keras_files.WEIGHTS in archive.namelist()
    except _BROKEN_ZIP:
        return False


def _stored_weights(path: Path) -> bytes:
    """Return the file of weights in an archive, held against its checksum. Raises DamagedError."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(keras_files.WEIGHTS)
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > entry.compress_size:
                raise ValueError("it is compressed, which Keras never does")
            return archive.read(entry)
    except _BROKEN_ZIP as error:
        raise damaged(f"{path}: {keras_files.WEIGHTS}", "the bytes that were written", f"{error}") from error


def _tensorflow(
    path: Path, weights: Weights, part: str | None, new_name: Rename
) -> tuple[str, Sources] | None:
    place = find_bundle(path)
    if place is None:
        return None
    bundle, where = TfBundle(place.prefix), str(place.prefix)
    for problem in bundle.problems:
        raise damaged(f"{where}: {problem.file}", "a whole checkpoint", problem.problem)
    graph = read_graph(bundle)
    if graph is None:
        _refuse(part, f"{where}, which has names alone")
        return where, [("", _by_names(bundle, weights, new_name))]
    children = graph.nodes[0].children
    if part is not None and part not in children:
        raise UsageError(
            f"warm_start: expected part= to be one of {', '.join(children)}, found {part!r}",
            hint="`unbroken inspect` lists what a checkpoint holds",
        )
    nodes = {"": 0, **children} if part is None else {part: children[part]}
    return where, [(name, _below(bundle, graph, node, weights)) for name, node in nodes.items()]


def _by_names(bundle: TfBundle, weights: Weights, new_name: Rename) -> Tensors:
    """Return what a saver by names kept, without what it kept for training.

    What becomes a weight of the model is one all the same, as an average that takes the place of its owner.
    """
    names = {key: _spelled(key) for key, entry in bundle.entries.items() if entry.element.is_number}
    left_out = set()
    for name, spellings in names.items():
        if not is_kept_for_training(name, names):
            continue
        owner, changed = name.rpartition("/")[0], _changed(spellings, new_name)
        if not any(known in weights.tensors for known in (*changed[:1], *spellings)):
            left_out.add(name)
        elif changed and changed[0] in names.get(owner, ()) and not _changed(names[owner], new_name):
            left_out.add(owner)
    return [
        Spelled(key=name, load=_loader(bundle, name), spellings=spellings)
        for name, spellings in names.items()
        if name not in left_out
    ]


def is_kept_for_training(name: str, names: Container[str]) -> bool:
    """Tell whether a saver by names kept `name`, one of `names`, for an optimizer: no weight of a model.

    >>> is_kept_for_training("dense/kernel/Adam_1", {"dense/kernel", "dense/kernel/Adam_1"})
    True
    """
    owner, _, last = name.rpartition("/")
    return last in _NO_WEIGHTS or owner in names


def _below(bundle: TfBundle, graph: ObjectGraph, root: int, weights: object) -> Tensors:
    """Return the variables of the object `root`, without those of optimizers."""
    names = weights.names_in_graph(bundle, graph, root) if isinstance(weights, NamesObjects) else {}
    full_names = graph.full_names()
    found = []
    for path, node in _without_optimizers(graph, root):
        for attribute in graph.nodes[node].attributes:
            entry = bundle.entries.get(attribute.key)
            if attribute.name != VALUE or entry is None or not entry.element.is_number:
                continue
            name = names.get(attribute.key)
            # The model has it, and it is no weight.
            if name == "" or path == "save_counter":
                continue
            full = full_names.get(attribute.key, "")
            spellings = (*_spelled(path), *(_spelled(full) if full else ("", "", "")), name or "")
            load = _loader(bundle, attribute.key)
            found.append(Spelled(key=attribute.key, load=load, spellings=spellings))
    return found


def _without_optimizers(graph: ObjectGraph, root: int) -> Iterator[tuple[str, int]]:
    seen, waiting = {root}, [("", root)]
    for path, current in waiting:
        node = graph.nodes[current]
        if node.slots or not _OF_OPTIMIZERS.isdisjoint(node.children):
            continue
        yield path, current
        for child, at in node.children.items():
            if at not in seen:
                seen.add(at)
                waiting.append((f"{path}/{child}" if path else child, at))


def _loader(bundle: TfBundle, key: str) -> Callable[[], HostTensor]:
    def load() -> HostTensor:
        entry = bundle.entries[key]
        if entry.dtype not in ITEM_BYTES:
            raise unreadable(key, f"{entry.element.name} is read for no model")
        return HostTensor(entry.dtype, entry.shape, memoryview(bundle.read(key)))

    return load
