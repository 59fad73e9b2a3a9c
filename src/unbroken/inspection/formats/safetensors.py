"""safetensors: one file, or several with an index that says which tensor is in which."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import (
    CheckpointReader,
    RegularFile,
    SingleFileReader,
    StoredTensor,
    damaged,
    encodable,
    tensor_bytes,
)

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER_BYTES = 100_000_000
_LARGEST_INDEX_BYTES = 100_000_000
# What may stand before the names of the tensors.
_SNIFFED_BYTES = 1 << 20
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def is_safetensors(first: bytes) -> bool:
    """Tell whether a file that begins with `first`, at least 9 bytes, is of this format."""
    if len(first) < _LENGTH.size + 1:
        return False
    (length,) = _LENGTH.unpack_from(first)
    # A file that was cut short inside its header is one, too.
    return first[_LENGTH.size : _LENGTH.size + 1] == b"{" and 2 <= length <= _LARGEST_HEADER_BYTES


def is_index(file: RegularFile) -> bool:
    """Tell whether a JSON file says which tensor is in which safetensors file."""
    return b'"weight_map"' in file.read(0, min(file.size_bytes, _SNIFFED_BYTES))


class SafetensorsFile(SingleFileReader):
    """A single file. The format carries no checksum; its header must account for every byte."""

    format = "safetensors"
    checksums = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        entries, length = _header(self._file)
        self._start = _LENGTH.size + length
        self._places: dict[str, tuple[int, int]] = {}
        self._enter(entries)
        self.problems = _tiling(path.name, self._places, self.size_bytes - self._start)

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError if the file ends before them."""
        begin, end = self._places[path]
        return memoryview(self._file.read(self._start + begin, end - begin))

    def verify(self) -> Iterator[Finding]:
        """Read everything; without checksums, only a disk that fails can be found."""
        for _ in self._file.pieces(0, self.size_bytes):
            pass
        yield from ()

    def _enter(self, entries: dict[str, Any]) -> None:
        try:
            metadata = entries.pop("__metadata__", None)
            if metadata is not None:
                self.facts["metadata"] = _clean(metadata)
            file = self.path.name
            for name, entry in entries.items():
                self._enter_tensor(file, name, entry["dtype"], entry["shape"], entry["data_offsets"])
        except _BROKEN as error:
            raise damaged(
                str(self.path), "a safetensors header", f"{type(error).__name__}: {error}"
            ) from error

    def _enter_tensor(self, file: str, name: str, dtype: Any, shape: list[Any], offsets: list[Any]) -> None:
        begin, end = offsets
        size = tensor_bytes(str(dtype), shape)
        if size is None:
            raise ValueError(f"{name}: no tensor is {dtype} {shape}")
        if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != size:
            raise ValueError(f"{name}: {dtype} {shape} in bytes {offsets}")
        path = encodable(name)
        if path in self.tensors:
            raise ValueError(f"{path} stands there twice")
        self._places[path] = (begin, end)
        self.tensors[path] = StoredTensor(dtype=dtype, shape=tuple(shape), size_bytes=size, where=file)


class ShardedSafetensors(CheckpointReader):
    """Several files and their index. Files that are missing or differ from the index are problems."""

    format = "safetensors, sharded"
    checksums = None

    def __init__(self, index: Path) -> None:
        self.path = index
        self.tensors = {}
        self.problems = []
        self.values = {}
        self.notes = []
        self._shards: dict[str, SafetensorsFile] = {}
        file = RegularFile(index)
        self.files = {index.name: file.size_bytes}
        weight_map, metadata = read_index(file)
        self.facts = {"metadata": metadata} if metadata else {}
        for name in sorted(set(weight_map.values())):
            self._open(name, index.parent)
        self._compare(weight_map)
        self.size_bytes = sum(self.files.values())

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError if its file ends before them."""
        return self._shards[self.tensors[path].where].read(path)

    def verify(self) -> Iterator[Finding]:
        """Read everything; without checksums, only a disk that fails can be found."""
        for shard in self._shards.values():
            yield from shard.verify()

    def _open(self, name: str, directory: Path) -> None:
        try:
            shard = SafetensorsFile(inside(directory, name))
        except DamagedError as error:
            self.problems.append(Finding(file=name, problem=error.message))
            return
        self._shards[name] = shard
        self.files[name] = shard.size_bytes
        self.problems += shard.problems

    def _compare(self, weight_map: dict[str, str]) -> None:
        for path, name in weight_map.items():
            shard = self._shards.get(name)
            if shard is None:
                continue
            found = shard.tensors.get(path)
            if found is None:
                self.problems.append(Finding(file=name, problem=f"tensor {path}: not in this file"))
            else:
                self.tensors[path] = found
        for name, shard in self._shards.items():
            strangers = [path for path in shard.tensors if weight_map.get(path) != name]
            if strangers:
                self.problems.append(
                    Finding(file=name, problem=f"tensor {strangers[0]}: the index does not name it")
                )


def _header(file: RegularFile) -> tuple[dict[str, Any], int]:
    (length,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
    if length > min(_LARGEST_HEADER_BYTES, file.size_bytes - _LENGTH.size):
        raise damaged(
            str(file.path), f"a header within {file.size_bytes} bytes", f"one of {length}: it was cut short"
        )
    try:
        entries = json.loads(bytes(file.read(_LENGTH.size, length)), object_pairs_hook=_without_doubles)
    except _BROKEN as error:
        raise damaged(str(file.path), "a safetensors header", f"{error}") from error
    if not isinstance(entries, dict):
        raise damaged(str(file.path), "a safetensors header", type(entries).__name__)
    return entries, length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _tiling(name: str, places: dict[str, tuple[int, int]], data_bytes: int) -> list[Finding]:
    """Return where the tensors overlap, leave gaps, or do not fill the file."""
    problems, end = [], 0
    for begin, finish, path in sorted((begin, finish, path) for path, (begin, finish) in places.items()):
        if begin != end:
            words = (
                "overlaps the one before it" if begin < end else f"{begin - end} bytes before it are nobody's"
            )
            problems.append(Finding(file=name, problem=f"tensor {path}: {words}"))
        end = max(end, finish)
        if finish > data_bytes:
            problems.append(
                Finding(
                    file=name, problem=f"tensor {path}: the file ends {finish - data_bytes} bytes before it"
                )
            )
    if end < data_bytes:
        problems.append(Finding(file=name, problem=f"{data_bytes - end} bytes at the end are nobody's"))
    return problems


def read_index(file: RegularFile) -> tuple[dict[str, str], dict[str, Any]]:
    """Return which file each tensor is in, and the metadata. Raises DamagedError."""
    if file.size_bytes > _LARGEST_INDEX_BYTES:
        raise damaged(str(file.path), f"at most {_LARGEST_INDEX_BYTES} bytes", f"{file.size_bytes}")
    try:
        found = json.loads(bytes(file.read(0, file.size_bytes)), object_pairs_hook=_without_doubles)
        weight_map = {encodable(path): encodable(name) for path, name in found["weight_map"].items()}
        metadata = _clean(found.get("metadata") or {})
    except _BROKEN as error:
        raise damaged(
            str(file.path), "an index of safetensors files", f"{type(error).__name__}: {error}"
        ) from error
    return weight_map, metadata


def _clean(metadata: dict[str, Any]) -> dict[str, str]:
    return {encodable(key): encodable(str(value)) for key, value in metadata.items()}


def inside(directory: Path, name: str) -> Path:
    """Return the path of a shard. Raises DamagedError if there is none, or it leads elsewhere."""
    path = directory / name
    # Unlike that of Path, this answer to a name that no file can have is no error.
    if name in ("", ".", "..") or "/" in name or "\x00" in name or not os.path.exists(path):
        raise damaged(name, "a file beside the index", "none")
    # The cache of a model hub keeps all files in one place, and links to them from each revision.
    allowed = (directory.resolve(), (directory / "../../blobs").resolve())
    if path.resolve().parent not in allowed:
        raise damaged(name, "a file beside the index", f"a link to {path.resolve()}")
    return path
