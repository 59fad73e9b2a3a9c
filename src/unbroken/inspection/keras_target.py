"""`.keras`, written: the weights of a model, with the configuration that another file has of the same one."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.inspection.formats.keras import ARCHIVE, OF_KERAS
from unbroken.inspection.formats.zips import ZipEntries
from unbroken.inspection.hdf5_target import (
    BESIDE,
    beside,
    keras_places,
    pieces_of,
    refused_by_hdf5,
    written_hdf5,
)
from unbroken.interchange.keras_files import CONFIG, METADATA, OPTIMIZER, WEIGHTS
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

_ASSETS = "assets/"
_MOST_NAMED = 20


class KerasTarget(Target):
    """One `.keras`, which `load_model` takes. What is no weight is that of the file `like`."""

    suffix = ".keras"

    def __init__(self, like: Path) -> None:
        self._like = open_checkpoint(like)

    def files(self, target: Path) -> tuple[Path, ...]:
        return (target,)

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        return refused_by_hdf5(path, entry)

    def keeps_names(self, reader: CheckpointReader) -> bool:
        """Tell that the model gives them."""
        return False

    def check(self, reader: CheckpointReader) -> None:
        """Raise UsageError unless the weights are those of the model in `like`."""
        like = self._like
        if like.format != ARCHIVE or like.problems:
            wrong = f"{like.problems[0].file}: {like.problems[0].problem}" if like.problems else like.format
            raise UsageError(
                f"{like.path}: expected a whole .keras file, found {wrong}",
                hint="let model.save('like.keras') write one, of the same model",
            )
        if not keras_places(reader):
            raise UsageError(
                f"{reader.path}: expected a checkpoint of one model of Keras, found {reader.format} without",
                hint="`unbroken inspect` shows what is in it; .safetensors takes all tensors",
            )
        found = list(_differences(reader, like))
        if found:
            more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise UsageError(
                f"{like.path}: expected the model of {reader.path}, found others: "
                + "; ".join(found[:_MOST_NAMED])
                + more,
                hint="give --like a file of the same model: let the script that trains model.save() one",
            )

    def notes(self, reader: CheckpointReader) -> Iterator[str]:
        places = self._places(reader)
        yield f"configuration and assets are those of {self._like.path.name}, of which weights were compared"
        if not any(_is_optimizers(place) for stored in places.values() for place in stored):
            yield "the optimizer has no state in it: one that is compiled in begins anew"
        yield from beside(reader, places)

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        places = self._places(reader)
        with written_hdf5(target.absolute().parent, places, tensors) as scratch:
            return storage.write(target.name, self._archive(scratch))

    def _places(self, reader: CheckpointReader) -> dict[str, list[str]]:
        """Return where weights go, and the state of an optimizer if the other file has just such a one."""
        places = keras_places(reader)
        optimizers = {path for path, stored in places.items() if _is_optimizers(stored[0])}
        if _stored(reader, of_optimizer=True) == _stored(self._like, of_optimizer=True):
            return places
        return {path: stored for path, stored in places.items() if path not in optimizers}

    def _archive(self, weights: int) -> Iterator[Buffer]:
        """Yield the archive: nothing of it is compressed, as Keras writes it."""
        like, sink = ZipEntries(self._like.path), _Sink()
        copied = [name for name in like.entries if name in (METADATA, CONFIG) or name.startswith(_ASSETS)]
        with zipfile.ZipFile(sink, "w") as archive:
            for name in copied:
                if not name.endswith("/"):
                    data = bytes(like.read(name))
                    yield from _entry(archive, sink, name, len(data), [data])
            yield from _entry(archive, sink, WEIGHTS, os.fstat(weights).st_size, pieces_of(weights))
        yield sink.taken()


class _Sink(io.RawIOBase):
    """What a zip file is written to, and taken from piece by piece."""

    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        self._data += data
        return len(data)

    def taken(self) -> bytes:
        """Return what has been written since the last time."""
        data, self._data = bytes(self._data), bytearray()
        return data


def _entry(
    archive: zipfile.ZipFile, sink: _Sink, name: str, size_bytes: int, pieces: Iterable[bytes]
) -> Iterator[bytes]:
    # Without the time, so that the same weights make the same file.
    entry = zipfile.ZipInfo(name)
    entry.file_size = size_bytes
    with archive.open(entry, "w") as opened:
        for piece in pieces:
            opened.write(piece)
            yield sink.taken()


def _differences(reader: CheckpointReader, like: CheckpointReader) -> Iterator[str]:
    """Yield a line for each weight that is not alike."""
    mine = _stored(reader, of_optimizer=False)
    theirs = _stored(like, of_optimizer=False)
    for place in dict.fromkeys((*mine, *theirs)):
        if mine.get(place) != theirs.get(place):
            here, there = (side.get(place, "none") for side in (mine, theirs))
            yield f"{place}: {there}, the checkpoint has {here}"


def _stored(reader: CheckpointReader, *, of_optimizer: bool) -> dict[str, str]:
    """Return what lies at each place where Keras looks for weights, or for the state of an optimizer."""
    is_file = reader.format in OF_KERAS
    return {
        place: kind
        for path, places in keras_places(reader).items()
        for place, kind in _kinds(reader, path, places)
        # What this has written beside the weights of a run is for no one there.
        if _is_optimizers(place) is of_optimizer and not (is_file and place.partition("/")[0] == BESIDE)
    }


def _kinds(reader: CheckpointReader, path: str, places: Iterable[str]) -> Iterator[tuple[str, str]]:
    entry = reader.tensors[path]
    words = f"{entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}"
    return ((place, words) for place in places)


def _is_optimizers(place: str) -> bool:
    return place.partition("/")[0] == OPTIMIZER
