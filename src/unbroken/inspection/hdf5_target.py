"""`.weights.h5`, written: laid out as Keras does for a model of Keras, as plain named arrays else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unbroken.errors import UsageError
from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.inspection.formats.keras import OF_KERAS
from unbroken.storage.local import LocalStorage

_MODEL = "keras.model"
# What a part of a Keras model has beside its variables: their paths in a file of weights, in the same order.
_FILE = "(file)"
# Tensors that are no weights of the model lie apart, where Keras looks for none of its own.
BESIDE = "unbroken"
_PIECE_BYTES = 8 << 20
_NUMBERS = {
    "I8": "STD_I8LE",
    "U8": "STD_U8LE",
    "I16": "STD_I16LE",
    "U16": "STD_U16LE",
    "I32": "STD_I32LE",
    "U32": "STD_U32LE",
    "I64": "STD_I64LE",
    "U64": "STD_U64LE",
    "F16": "IEEE_F16LE",
    "F32": "IEEE_F32LE",
    "F64": "IEEE_F64LE",
}
_COMPLEX = {"C64": ("IEEE_F32LE", 8), "C128": ("IEEE_F64LE", 16)}
_KNOWN = frozenset({*_NUMBERS, *_COMPLEX, "BOOL", "BF16"})


class Hdf5Target(Target):
    """One HDF5 file. `load_weights` of Keras takes it if the checkpoint is ours, of one model of Keras."""

    suffix = ".weights.h5"

    def files(self, target: Path) -> tuple[Path, ...]:
        return (target,)

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        return refused_by_hdf5(path, entry)

    def keeps_names(self, reader: CheckpointReader) -> bool:
        """Tell whether this is no file as Keras lays it out."""
        return not keras_places(reader)

    def notes(self, reader: CheckpointReader) -> Iterator[str]:
        places = keras_places(reader)
        for path, place in distinct(reader.tensors).items():
            if path not in places and place != path:
                yield f"{path}: written as {place}, for there are others below that name"
        if places:
            yield from beside(reader, places)
        else:
            yield "names are as in the source; load_weights of Keras takes what is of a model of Keras only"

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        with written_hdf5(target.absolute().parent, keras_places(reader), tensors) as scratch:
            return storage.write(target.name, pieces_of(scratch))


def beside(reader: CheckpointReader, places: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what is to be said of the tensors that have none of the `places` of a model."""
    count = sum(path not in places for path in reader.tensors)
    if count:
        yield f"{count} tensors that are no weights of the model lie below {BESIDE}/, unseen by Keras"


@contextmanager
def written_hdf5(
    directory: Path, places: Mapping[str, list[str]], tensors: Mapping[str, UnreadTensor]
) -> Iterator[int]:
    """Write `tensors` to an HDF5 file without a name in `directory`, and yield its descriptor.

    Where each lies is in `places`; all others lie apart from these. Raises DamagedError.
    """
    others = distinct(tensors)
    if places:
        others = {path: f"{BESIDE}/{place}" for path, place in others.items()}
    named = {places[path][0] if path in places else others[path]: tensor for path, tensor in tensors.items()}
    links = {link: first for first, *more in places.values() for link in more if first in named}
    # It has no name, so that it is gone whatever happens.
    with tempfile.TemporaryFile(dir=directory) as scratch:
        offsets = _lay_out(scratch, named, links)
        for place, tensor in named.items():
            if offsets[place] is not None:
                _write_at(scratch.fileno(), tensor.data, offsets[place])
        yield scratch.fileno()


def refused_by_hdf5(path: str, entry: StoredTensor) -> str | None:
    """Return why a tensor has no place in HDF5, None if it has."""
    if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        return "HDF5 has no such names"
    return None if entry.dtype in _KNOWN else f"HDF5 has no {entry.dtype}"


def keras_places(reader: CheckpointReader) -> dict[str, list[str]]:
    """Return where Keras looks for the weights in a file of Keras, or of the one model in a run, by path.

    There are several places for what several layers have. It is empty for everything else.
    """
    if reader.format in OF_KERAS:
        return {path: [entry.where, *entry.aliases] for path, entry in reader.tensors.items()}
    handlers = reader.facts.get("handlers", {})
    models = [name for name, handler in handlers.items() if handler == _MODEL]
    state = reader.values.get(models[0], {}) if len(models) == 1 else {}
    layout = state.get(_FILE, ())
    variables = [item["$tensor"] for name, item in state.items() if not name.startswith("(")]
    if len(layout) != len(variables):
        return {}
    paired = zip(variables, layout, strict=True)
    return {path: place if isinstance(place, list) else [str(place)] for path, place in paired if place}


def distinct(paths: Iterable[str]) -> dict[str, str]:
    """Return names for `paths` of which none is what another lies in, for that is a group in HDF5.

    >>> distinct(["a", "a/b"])
    {'a': "a'", 'a/b': 'a/b'}
    """
    found = {path: path for path in paths}
    groups = {path[:at] for path in found for at, letter in enumerate(path) if letter == "/"}
    taken = {*found, *groups}
    for path in sorted(found.keys() & groups):
        name = path
        while name in taken:
            name += "'"
        taken.add(name)
        found[path] = name
    return found


def _lay_out(
    file: Any, tensors: Mapping[str, UnreadTensor], links: Mapping[str, str]
) -> dict[str, int | None]:
    """Write the headers of a file of `tensors`; return where the bytes of each go, None if it has none.

    `links` are further places by which some of them are found.
    """
    h5py = _library()
    with h5py.File(file, "w") as made:
        created = {place: _create(h5py, made, place, tensor) for place, tensor in tensors.items()}
        for link, first in links.items():
            _group(made, link)[link.rpartition("/")[2]] = made[first]
        made.flush()
        return {place: dataset.get_offset() for place, dataset in created.items()}


def _create(h5py: Any, made: Any, place: str, tensor: UnreadTensor) -> Any:
    group, name = _group(made, place), place.rpartition("/")[2]
    space = h5py.h5s.create_simple(tensor.shape) if tensor.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # There is room for the bytes before any are written, and nothing is written twice.
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Without it every name is called ASCII, and readers find those damaged that are not.
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    made_id = h5py.h5d.create(group.id, name.encode(), _type(h5py, tensor.dtype), space, creation, link)
    if tensor.dtype == "BF16":
        # By this Keras knows them again.
        h5py.Dataset(made_id).attrs["dtype"] = "bfloat16"
    return made_id


def _group(made: Any, place: str) -> Any:
    # One by one: of those that HDF5 makes on the way to another, it calls every name ASCII.
    for name in place.split("/")[:-1]:
        made = made.require_group(name)
    return made


def _type(h5py: Any, dtype: str) -> Any:
    if dtype in _NUMBERS:
        return getattr(h5py.h5t, _NUMBERS[dtype])
    if dtype == "BF16":
        return h5py.h5t.create(h5py.h5t.OPAQUE, 2)
    if dtype == "BOOL":
        kind = h5py.h5t.enum_create(h5py.h5t.STD_I8LE)
        kind.enum_insert(b"FALSE", 0)
        kind.enum_insert(b"TRUE", 1)
        return kind
    name, size = _COMPLEX[dtype]
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, size)
    kind.insert(b"r", 0, getattr(h5py.h5t, name))
    kind.insert(b"i", size // 2, getattr(h5py.h5t, name))
    return kind


def _library() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise UsageError(
            "convert: expected h5py, which writes HDF5, found it is not installed",
            hint="install it: pip install 'unbroken[hdf5]'",
        ) from error
    return h5py


def _write_at(descriptor: int, data: memoryview, offset: int | None) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _PIECE_BYTES], (offset or 0) + done)


def pieces_of(descriptor: int) -> Iterator[bytes]:
    """Yield what is in a file from its beginning on."""
    size = os.fstat(descriptor).st_size
    for start in range(0, size, _PIECE_BYTES):
        yield os.pread(descriptor, _PIECE_BYTES, start)
