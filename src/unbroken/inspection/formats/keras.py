"""Files of Keras, `.weights.h5`, `.keras` the legacy `.h5`; and any other HDF5, as arrays by path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import (
    DTYPE_BITS,
    CheckpointReader,
    RegularFile,
    StoredTensor,
    swapped,
)
from unbroken.inspection.formats.zips import DOUBLED, ZipEntries
from unbroken.interchange import keras_files
from unbroken.interchange.hdf5 import Hdf5File

_FORMATS = {"weights": "Keras .weights.h5", "legacy": "legacy Keras .h5", "plain": "HDF5"}
ARCHIVE = "Keras .keras"
# In these a variable lies where Keras looks for it.
OF_KERAS = (_FORMATS["weights"], ARCHIVE)
_LARGEST_HEADER_BYTES = 256 << 20
_SEEDS = "the state of seed generators is in no file of this format: dropout goes on otherwise after it"
_NUMBERED = "variables have numbers in it; those of Keras' own layers are named by their order"


class KerasFile(CheckpointReader):
    """Arrays in HDF5, by the names that Keras has for them. No configuration is made into objects."""

    def __init__(self, path: Path, archive: ZipEntries | None = None) -> None:
        self.path = path
        self._zip = archive
        file = RegularFile(path) if archive is None else archive.file
        self.size_bytes = file.size_bytes
        self.files = {path.name: self.size_bytes}
        self.problems, self.notes, self.tensors, self.values = [], [], {}, {}
        self.facts = {}
        self.checksums = "CRC-32 of each entry" if archive is not None and archive.has_checksums else None
        if archive is None:
            self._hdf5 = Hdf5File(file.read, file.size_bytes, str(path))
        else:
            if archive.doubled:
                self.problems.append(Finding(file=path.name, problem=DOUBLED))
            self._hdf5 = _inside(archive)
        self._found = keras_files.contents(self._hdf5)
        self.format = _FORMATS[self._found.form] if archive is None else ARCHIVE
        self._enter_arrays()
        self._say()

    def read(self, path: str) -> memoryview:
        """Return the bytes of a variable. Raises DamagedError, StorageError."""
        place = self._found.paths[path]
        array = self._hdf5.arrays[place]
        data = self._hdf5.read(place)
        if array.kind.is_big_endian:
            data = swapped(data, self.tensors[path].dtype)
        return memoryview(data)

    def verify(self) -> Iterator[Finding]:
        """Read everything; only a `.keras` has checksums to hold it against."""
        if self._zip is not None:
            yield from self._zip.verify()
            return
        for path, tensor in self.tensors.items():
            try:
                self.read(path)
            except DamagedError as error:
                yield Finding(file=tensor.where, problem=error.message)

    def _enter_arrays(self) -> None:
        for place, problem in self._hdf5.problems:
            self.problems.append(Finding(file=place or "/", problem=problem))
        self.notes += self._hdf5.notes
        for name, place in self._found.paths.items():
            array = self._hdf5.arrays[place]
            if array.unread or array.kind.dtype not in DTYPE_BITS:
                self.notes.append(f"{place}: {array.unread or 'numbers of another kind'}")
                continue
            self.tensors[name] = StoredTensor(
                dtype=array.kind.dtype,
                shape=array.shape,
                size_bytes=array.size_bytes,
                where=place,
                aliases=tuple(array.aliases),
            )

    def _say(self) -> None:
        """Note what the file says of itself, and what it cannot have."""
        found = self._found
        metadata: dict[str, Any] = {**found.facts, **self._metadata()}
        config = self._config() if self._zip is not None else found.config
        if isinstance(config, dict) and isinstance(config.get("class_name"), str):
            metadata["model"] = config["class_name"]
        if found.layers:
            metadata["layers"] = found.layers
        self.facts = {"metadata": metadata, **({} if config is None else {"config": config})}
        if found.form == "weights":
            self.notes.append(_NUMBERED)
        if found.form != "plain" or self._zip is not None:
            self.notes.append(_SEEDS)
        named = keras_files.classes_in(config)
        if named.lambdas:
            self.notes.append(f"layers of code, which is never run: {', '.join(named.lambdas)}")
        if named.strangers:
            self.notes.append(f"classes that are none of Keras': {', '.join(named.strangers)}")

    def _metadata(self) -> dict[str, Any]:
        found = self._json(keras_files.METADATA) if self._zip is not None else None
        return found if isinstance(found, dict) else {}

    def _config(self) -> Any:
        return self._json(keras_files.CONFIG)

    def _json(self, name: str) -> Any:
        """Return what is in an entry of the archive, and note what is wrong with it."""
        archive = self._zip
        if archive is None or name not in archive.entries:
            self.problems.append(Finding(file=name, problem="this entry is missing"))
            return None
        try:
            return keras_files.config_of(archive.read(name, large_bytes=_LARGEST_HEADER_BYTES))
        except (ValueError, DamagedError) as error:
            self.problems.append(Finding(file=name, problem=f"{error}".partition("\n")[0]))
            return None


def _inside(archive: ZipEntries) -> Hdf5File:
    name = keras_files.WEIGHTS

    def read(start: int, size_bytes: int) -> bytearray:
        return archive.read_range(name, start, size_bytes)

    return Hdf5File(read, archive.entries[name].file_size, archive.at(name))
