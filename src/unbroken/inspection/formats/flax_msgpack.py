"""What `flax.serialization` writes: nested maps of MessagePack, in which arrays are extensions.

The file is walked through once, and what arrays hold is passed over: where it lies is noted. An array is a
shape, the name of a dtype and the elements; one of more than a gigabyte is a map of flat pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.inspection.formats.base import (
    SingleFileReader,
    StoredTensor,
    damaged,
    encodable,
    tensor_bytes,
    unreadable,
)
from unbroken.inspection.formats.msgpack import Bytes, Extension, Walker
from unbroken.inspection.formats.plain import join
from unbroken.inspection.formats.views import TORCH_DTYPES, integers, scalar

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_INLINE_BYTES = 64
_LARGEST_SCALAR_BYTES = 64
_MOST_PATH_CHARACTERS = 1 << 27
# A map of few keys, and then the length of a text.
_MAPS = frozenset({*range(0x81, 0x90), 0xDE, 0xDF})
_TEXTS = frozenset({*range(0xA1, 0xC0), 0xD9})


def is_flax(first: bytes) -> bool:
    """Tell whether a file that begins with `first` is a map whose first key is a text."""
    start = {0xDE: 3, 0xDF: 5}.get(first[0], 1) if first else 0
    if len(first) < start + 2 or first[0] not in _MAPS or first[start] not in _TEXTS:
        return False
    is_long = first[start] == 0xD9
    length = first[start + 1] if is_long else first[start] & 0x1F
    # The last letter may be cut by the end of `first`.
    key = first[start + 1 + is_long :][:length].decode("utf-8", "replace").rstrip("\ufffd")
    return bool(key) and key.isprintable() and "\ufffd" not in key


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


class FlaxMsgpack(SingleFileReader):
    """A file of `flax.serialization.to_bytes`. It carries no checksum."""

    format = "Flax, MessagePack"
    checksums = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._places: dict[str, list[_Array]] = {}
        self._path_characters = 0
        walker = Walker(self._file)
        self.values = self._plain(walker.value(), "")
        if walker.position < self.size_bytes:
            rest = self.size_bytes - walker.position
            self.problems.append(Finding(file=path.name, problem=f"{rest} bytes at the end are nobody's"))

    def read(self, path: str) -> memoryview:
        """Return the bytes of an array. Raises DamagedError if they are not all there."""
        pieces = self._places[path]
        if len(pieces) == 1:
            return memoryview(self._file.read(pieces[0].start, pieces[0].size_bytes))
        return memoryview(bytearray().join(self._file.read(one.start, one.size_bytes) for one in pieces))

    def verify(self) -> Iterator[Finding]:
        """Read everything; without checksums, only a disk that fails can be found."""
        for _ in self._file.pieces(0, self.size_bytes):
            pass
        yield from ()

    def _plain(self, node: Any, path: str) -> Any:
        if isinstance(node, dict):
            if node.get(_CHUNKED) is True:
                return self._chunked(node, path)
            return {encodable(str(key)): self._plain(item, join(path, key)) for key, item in node.items()}
        if isinstance(node, list):
            return [self._plain(item, join(path, index)) for index, item in enumerate(node)]
        if isinstance(node, Bytes):
            return self._byte_string(node, path)
        if isinstance(node, Extension):
            return self._extension(node, path)
        return encodable(node) if isinstance(node, str) else node

    def _extension(self, node: Extension, path: str) -> Any:
        if node.code == _COMPLEX:
            parts = Walker(self._file, node.start, node.start + node.size_bytes).value()
            return f"complex{tuple(parts)}" if isinstance(parts, list) and len(parts) == 2 else "complex"
        if node.code not in (_ARRAY, _SCALAR):
            return {"$object": f"MessagePack extension {node.code}"}
        array = self._array(node, path)
        if array is None:
            return {"$object": "array"}
        if node.code == _SCALAR and array.size_bytes <= _LARGEST_SCALAR_BYTES:
            return scalar(bytes(self._file.read(array.start, array.size_bytes)), array.dtype, False)
        return self._enter(path, array.dtype, array.shape, [array])

    def _array(self, node: Extension, path: str) -> _Array | None:
        """Return an array, None if it is of a dtype that is not known, which is noted."""
        where, end = f"{self.path}: {encodable(path)}", node.start + node.size_bytes
        said = Walker(self._file, node.start, end).value()
        match said:
            case [list() as lengths, str() | Bytes() as name, Bytes() as data]:
                shape = integers(lengths)
                kind = name if isinstance(name, str) else ""
            case _:
                raise damaged(where, "a shape, a dtype and elements", "something else")
        dtype = TORCH_DTYPES.get(kind)
        if dtype is None:
            self.notes.append(f"array {encodable(path)} is not read: elements of the kind {encodable(kind)}")
            return None
        size = None if shape is None else tensor_bytes(dtype, shape)
        if shape is None or size != data.size_bytes or data.start + data.size_bytes != end:
            raise damaged(where, f"{size} bytes of {dtype} {shape}", f"{data.size_bytes}")
        return _Array(dtype, shape, data.start, data.size_bytes)

    def _chunked(self, node: dict[Any, Any], path: str) -> Any:
        where = f"{self.path}: {encodable(path)}"
        shape, chunks = (_in_order(node.get(key)) for key in ("shape", "chunks"))
        if chunks is None or not all(isinstance(chunk, Extension) for chunk in chunks):
            raise damaged(where, "an array in pieces", "something else")
        arrays = [self._array(chunk, path) for chunk in chunks]
        known = [array for array in arrays if array is not None]
        dtypes = {array.dtype for array in known}
        if len(known) != len(arrays) or not known:
            return {"$object": "array"}
        lengths, dtype = integers(shape), known[0].dtype
        size = None if lengths is None else tensor_bytes(dtype, lengths)
        total = sum(array.size_bytes for array in known)
        if lengths is None or len(dtypes) != 1 or size != total:
            raise damaged(where, f"{size} bytes in its pieces", f"{total}")
        return self._enter(path, dtype, lengths, known)

    def _byte_string(self, node: Bytes, path: str) -> Any:
        if node.size_bytes <= _INLINE_BYTES:
            return repr(bytes(self._file.read(node.start, node.size_bytes)))
        array = _Array("U8", (node.size_bytes,), node.start, node.size_bytes)
        return self._enter(path, "U8", array.shape, [array])

    def _enter(self, path: str, dtype: str, shape: tuple[int, ...], pieces: list[_Array]) -> dict[str, Any]:
        path = encodable(path) or "data"
        while path in self.tensors:
            path += "'"
        self._path_characters += len(path)
        if self._path_characters > _MOST_PATH_CHARACTERS:
            raise unreadable(str(self.path), "too many long names")
        size = sum(piece.size_bytes for piece in pieces)
        self.tensors[path] = StoredTensor(dtype=dtype, shape=shape, size_bytes=size, where=self.path.name)
        self._places[path] = pieces
        return {"$tensor": path}


def _in_order(node: Any) -> list[Any] | None:
    """Return the items of a map that stands for a list: its keys are their numbers."""
    if isinstance(node, list):
        return node
    if not isinstance(node, dict) or not all(str(index) in node for index in range(len(node))):
        return None
    return [node[str(index)] for index in range(len(node))]
