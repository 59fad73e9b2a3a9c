"""NumPy's .npz: a zip file with one array in each entry."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import CheckpointReader, damaged, row_major
from unbroken.inspection.formats.elements import read_view, stored
from unbroken.inspection.formats.views import NUMPY_DTYPES, Storage, View, make_view
from unbroken.inspection.formats.zips import DOUBLED, ZipEntries

_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_LARGEST_HEADER_BYTES = 1 << 16
_FIRST_BYTES = 128
_DESCR = re.compile(r"'descr': *'([<>|=])([a-zA-Z]\d+)'")
_ORDER = re.compile(r"'fortran_order': *(True|False)")
_SHAPE = re.compile(r"'shape': *\(([\d, ]*)\)")
_LENGTH = re.compile(r"[0-9]{1,18}")


def is_npz(names: list[str]) -> bool:
    """Tell whether a zip file with these entries is of this format; without any it has no arrays."""
    return all(name.endswith(_SUFFIX) for name in names)


class Npz(CheckpointReader):
    """A file of `numpy.savez`. Arrays of Python objects are pickles, and are not opened."""

    format = "npz"

    def __init__(self, path: Path, entries: ZipEntries) -> None:
        self.path = path
        self._zip = entries
        self.size_bytes = entries.file.size_bytes
        self.files = {path.name: self.size_bytes}
        self.checksums = "CRC-32 of each entry" if entries.has_checksums else None
        self.tensors = {}
        self.values = {}
        self.facts = {}
        self.problems = [Finding(file=path.name, problem=DOUBLED)] if entries.doubled else []
        self.notes = []
        self._views: dict[str, tuple[View, int]] = {}
        for name in entries.entries:
            try:
                self._enter(name)
            except DamagedError as error:
                self.problems.append(Finding(file=name, problem=error.message))

    def read(self, path: str) -> memoryview:
        """Return the bytes of an array. Raises DamagedError if they are not all there."""
        view, header = self._views[path]
        return read_view(
            view, lambda start, size: self._zip.read_range(view.storage.key, header + start, size)
        )

    def verify(self) -> Iterator[Finding]:
        """Read every entry against its checksum."""
        yield from self._zip.verify()

    def _enter(self, entry: str) -> None:
        size = self._zip.entries[entry].file_size
        # Nearly all headers are of this size.
        first = bytes(self._zip.read_range(entry, 0, min(size, _FIRST_BYTES)))
        if len(first) < 12 or not first.startswith(_MAGIC):
            raise damaged(entry, "an array of NumPy", "something else")
        start, form = (10, "<H") if first[6] == 1 else (12, "<I")
        (length,) = struct.unpack(form, first[8:start])
        if length > min(_LARGEST_HEADER_BYTES, size - start):
            raise damaged(entry, f"a header of at most {_LARGEST_HEADER_BYTES} bytes", f"{length}")
        header = first[start : start + length]
        if len(header) < length:
            header = bytes(self._zip.read_range(entry, start, length))
        name, view = entry.removesuffix(_SUFFIX), _view(entry, header)
        if view is None:
            self.notes.append(f"{entry}: an array that is no tensor, {_in_words(header)}")
            return
        if start + length + view.size_bytes != size:
            raise damaged(entry, f"{start + length + view.size_bytes} bytes", f"{size}")
        self._views[name] = (view, start + length)
        self.tensors[name] = stored(view, entry, [])


def _view(entry: str, header: bytes) -> View | None:
    described = _described(header)
    if described is None:
        return None
    dtype, lengths, strides, is_big_endian = described
    return make_view(Storage(key=entry, dtype=dtype), 0, lengths, strides, big_endian=is_big_endian)


def _in_words(header: bytes) -> str:
    return " ".join(header.decode("latin-1").split())[:60]


# Of many arrays most have the same: reading one takes longer than all the rest of its entry.
@lru_cache(maxsize=256)
def _described(data: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...], bool] | None:
    """Return the dtype, lengths and strides that a header tells, and whether it is of big-endian numbers."""
    header = data.decode("latin-1")
    found = [pattern.search(header) for pattern in (_DESCR, _ORDER, _SHAPE)]
    if None in found:
        return None
    descr, order, shape = (match for match in found if match is not None)
    dtype = NUMPY_DTYPES.get(descr[2])
    words = [length.strip() for length in shape[1].split(",") if length.strip()]
    if dtype is None or len(words) > 64 or not all(map(_LENGTH.fullmatch, words)):
        return None
    lengths = tuple(map(int, words))
    strides = row_major(lengths[::-1])[::-1] if order[1] == "True" else row_major(lengths)
    return dtype, lengths, strides, descr[1] == ">"
