"""The arrays of one item of Orbax, in a store of chunks (OCDBT) or in files, read through `tensorstore`."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import DamagedError, StorageError
from unbroken.inspection.formats.base import damaged, tensor_bytes, unreadable
from unbroken.inspection.formats.views import NUMPY_DTYPES

MISSING = "arrays are named and not read without tensorstore: pip install 'unbroken[orbax]'"
# Those of the extension of NumPy for machine learning, and the words of the third form of zarr.
_DTYPES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
    "bool": "BOOL",
    # A byte each, when they are read.
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}8" for sign in ("", "u") for bits in (2, 4)},
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_ZARR, _ZARR3 = ".zarray", "zarr.json"
_CHUNK = re.compile(r"(?:c/?)?(?:[0-9]+(?:[./][0-9]+)*)?")
_LARGEST_METADATA_BYTES = 1 << 20
# All compressors leave more of what training writes; a few bytes must not become terabytes.
_LARGEST_RATIO = 4096
_SMALL_BYTES = 16 << 20
# What tensorstore raises for bytes that are not as they were written.
_ERRORS = (ValueError, KeyError, IndexError, OSError, RuntimeError, NotImplementedError, MemoryError)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as its own metadata describe it."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    driver: str


def library() -> Any:
    """Return tensorstore, or None if it is not installed."""
    try:
        return importlib.import_module("tensorstore")
    except ImportError:
        return None


class Arrays:
    """The arrays in `directory`. Raises DamagedError if the store cannot be opened."""

    def __init__(self, tensorstore: Any, directory: Path, size_bytes: int, *, is_ocdbt: bool) -> None:
        self._tensorstore = tensorstore
        self._directory = directory
        self._size_bytes = size_bytes
        base = f"{directory.resolve().as_posix()}/"
        self._spec: dict[str, Any] = (
            {"driver": "ocdbt", "base": {"driver": "file", "path": base}}
            if is_ocdbt
            else {"driver": "file", "path": base}
        )
        try:
            self._store = tensorstore.KvStore.open(self._spec).result()
            keys = [key.decode("utf-8", "backslashreplace") for key in self._store.list().result()]
        except _ERRORS as error:
            raise self._damaged("its store", error) from error
        self._chunks, self._described = _sorted_out(keys)

    def array(self, name: str) -> StoredArray:
        """Return what the array of that name is. Raises DamagedError if it is not there as a whole."""
        file = self._described.get(name)
        if file is None:
            raise damaged(name, "its description in the store", "none")
        array, chunks = _described(name, self._metadata(name, file), file)
        if self._chunks[name] < chunks:
            raise damaged(name, f"{chunks} chunks", f"{self._chunks[name]}")
        return array

    def read(self, name: str, array: StoredArray) -> memoryview:
        """Return the bytes of an array, row-major. Raises DamagedError, or StorageError if it is a trap."""
        if array.size_bytes > max(_SMALL_BYTES, self._size_bytes * _LARGEST_RATIO):
            raise unreadable(name, f"{array.size_bytes} bytes out of {self._size_bytes} are not written out")
        spec = {"driver": array.driver, "kvstore": {**self._spec, "path": self._path(name)}}
        try:
            found = self._tensorstore.open(spec, read=True).result().read().result()
            data = memoryview(found.tobytes())
        except _ERRORS as error:
            raise self._damaged(name, error) from error
        if len(data) != array.size_bytes:
            raise damaged(name, f"{array.size_bytes} bytes", f"{len(data)}")
        return data

    def _path(self, name: str) -> str:
        return f"{self._spec['path']}{name}/" if "path" in self._spec else f"{name}/"

    def _metadata(self, name: str, file: str) -> Mapping[str, Any]:
        try:
            text = self._store.read(f"{name}/{file}").result().value
            if len(text) > _LARGEST_METADATA_BYTES:
                raise damaged(
                    name, f"at most {_LARGEST_METADATA_BYTES} bytes that describe it", f"{len(text)}"
                )
            found = json.loads(text)
        except (*_ERRORS, RecursionError) as error:
            raise self._damaged(name, error) from error
        if not isinstance(found, dict):
            raise damaged(name, "a description", type(found).__name__)
        return found

    def _damaged(self, what: str, error: BaseException) -> DamagedError:
        # Its words begin with a code, and name files by their whole path.
        text = " ".join(str(error).replace(str(self._directory.resolve()), "").split())[:300]
        return damaged(what, "what was written", text or type(error).__name__)


def _sorted_out(keys: Sequence[str]) -> tuple[Counter[str], dict[str, str]]:
    """Return how many chunks there are of each array, and the file that describes it."""
    described = {
        name: file for key in keys for name, _, file in [key.rpartition("/")] if file in (_ZARR, _ZARR3)
    }
    chunks: Counter[str] = Counter()
    for key in keys:
        name = _array_of(key, described)
        if name is not None and _CHUNK.fullmatch(key[len(name) + 1 :]):
            chunks[name] += 1
    return chunks, described


def _array_of(key: str, described: Mapping[str, str]) -> str | None:
    name = key
    while name := name.rpartition("/")[0]:
        if name in described:
            return name
    return None


def _described(name: str, said: Mapping[str, Any], file: str) -> tuple[StoredArray, int]:
    """Return the array that metadata of zarr describe, and the number of its chunks."""
    shape, word, pieces = said.get("shape"), said.get("dtype"), said.get("chunks")
    if file == _ZARR3:
        grid = said.get("chunk_grid")
        settings = grid.get("configuration") if isinstance(grid, dict) else None
        pieces = settings.get("chunk_shape") if isinstance(settings, dict) else None
        word = said.get("data_type")
    if not (isinstance(shape, list) and isinstance(pieces, list) and len(shape) == len(pieces)):
        raise damaged(name, "a shape and one of its chunks", f"{shape!r:.60} and {pieces!r:.60}")
    dtype = _DTYPES.get(str(word)) or NUMPY_DTYPES.get(str(word).lstrip("<>|="))
    if dtype is None:
        raise StorageError(
            f"{name}: expected an array of numbers, found one of {word!r:.40}", hint="it is listed as a note"
        )
    size = tensor_bytes(dtype, shape)
    if size is None or not all(type(length) is int and length > 0 for length in pieces):
        raise damaged(name, "a shape that an array can have", f"{shape!r:.60} in chunks of {pieces!r:.60}")
    count = math.prod(-(-length // piece) for length, piece in zip(shape, pieces, strict=True))
    driver = "zarr3" if file == _ZARR3 else "zarr"
    return StoredArray(dtype, tuple(shape), size, driver), count
