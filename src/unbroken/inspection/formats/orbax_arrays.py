"""The arrays of one item of Orbax, in a store of chunks (OCDBT) or in files, read through `tensorstore`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import DamagedError, StorageError
from unbroken.inspection.formats.base import damaged, tensor_bytes, unreadable
from unbroken.inspection.formats.views import NUMPY_DTYPES

INSTALL = "pip install 'unbroken[orbax]'"
# Of these a byte each is read: in memory some versions leave the upper half as it was.
_BYTE_EACH = {f"{sign}int{bits}": f"{sign}int8" for sign in ("", "u") for bits in (2, 4)}
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
    **{word: f"{byte[:-4].upper() or 'I'}8" for word, byte in _BYTE_EACH.items()},
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_ZARR, _ZARR3 = ".zarray", "zarr.json"
_SHARDING = "sharding_indexed"
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
    """The arrays in `directory`: a chunk that is missing is one of zeros if it `may_lack_chunks`.

    Raises DamagedError if the store cannot be opened.
    """

    def __init__(
        self,
        tensorstore: Any,
        directory: Path,
        size_bytes: int,
        *,
        is_ocdbt: bool,
        may_lack_chunks: bool,
    ) -> None:
        self._tensorstore = tensorstore
        self._directory = directory
        self._size_bytes = size_bytes
        self._may_lack_chunks = may_lack_chunks
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
        self._described = {
            name: file for key in keys for name, _, file in [key.rpartition("/")] if file in (_ZARR, _ZARR3)
        }

    def array(self, name: str) -> StoredArray:
        """Return what the array of that name is.

        Raises DamagedError if there is none, StorageError if it is not one of numbers.
        """
        file = self._described.get(name)
        if file is None:
            raise damaged(name, "its description in the store", "none")
        return _described(name, self._metadata(name, file), file)

    def read(self, name: str, array: StoredArray) -> memoryview:
        """Return the bytes of an array, row-major. Raises DamagedError, or StorageError if it is a trap."""
        if array.size_bytes > max(_SMALL_BYTES, self._size_bytes * _LARGEST_RATIO):
            raise unreadable(name, f"{array.size_bytes} bytes out of {self._size_bytes} are not written out")
        spec = {
            "driver": array.driver,
            "kvstore": {**self._spec, "path": self._path(name)},
            # Otherwise a chunk that is lost is read as zeros.
            "fill_missing_data_reads": self._may_lack_chunks,
        }
        try:
            found = self._tensorstore.open(spec, read=True).result().read().result()
            narrow = _BYTE_EACH.get(found.dtype.name)
            data = memoryview((found if narrow is None else found.astype(narrow)).tobytes())
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


def _described(name: str, said: Mapping[str, Any], file: str) -> StoredArray:
    """Return the array that metadata of zarr describe."""
    shape, word, pieces = said.get("shape"), said.get("dtype"), [said.get("chunks")]
    if file == _ZARR3:
        grid = _settings(said.get("chunk_grid"))
        word, pieces = said.get("data_type"), [grid.get("chunk_shape"), *_inner_pieces(said.get("codecs"))]
    if not isinstance(shape, list):
        raise damaged(name, "a shape", f"{shape!r:.60}")
    dtype = _DTYPES.get(str(word)) or NUMPY_DTYPES.get(str(word).lstrip("<>|="))
    if dtype is None:
        raise StorageError(
            f"{name}: expected an array of numbers, found one of {word!r:.40}", hint="it is listed as a note"
        )
    size = tensor_bytes(dtype, shape)
    if size is None:
        raise damaged(name, "a shape that an array can have", f"{shape!r:.60}")
    for piece in pieces:
        # Whole chunks are unpacked, and memory for them taken before.
        if not (isinstance(piece, list) and len(piece) == len(shape) and all(map(_fits, piece, shape))):
            raise damaged(name, f"chunks of an array of {shape!r:.60}", f"{piece!r:.60}")
    return StoredArray(dtype, tuple(shape), size, "zarr3" if file == _ZARR3 else "zarr")


def _fits(piece: Any, length: int) -> bool:
    return type(piece) is int and 0 < piece <= max(length, 1)


def _inner_pieces(codecs: Any, deepest: int = 8) -> Iterator[Any]:
    """Yield the shapes of the chunks that a chunk is made of."""
    for codec in codecs if isinstance(codecs, list) else ():
        if isinstance(codec, dict) and codec.get("name") == _SHARDING:
            settings = _settings(codec)
            yield settings.get("chunk_shape")
            # What nests deeper is no list, and so refused.
            yield from _inner_pieces(settings.get("codecs"), deepest - 1) if deepest else (None,)


def _settings(said: Any) -> Mapping[str, Any]:
    settings = said.get("configuration") if isinstance(said, dict) else None
    return settings if isinstance(settings, dict) else {}
