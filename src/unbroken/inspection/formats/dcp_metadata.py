"""What `.metadata` of `torch.distributed.checkpoint` says: tensors, their pieces, where each of these lies.

It is a pickle, which is read and never executed. Of its classes the names and fields are looked at; releases
have added fields, and moved the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.inspection.formats.base import RegularFile, damaged, encodable, tensor_bytes
from unbroken.inspection.formats.opcodes import Global, Machine, Object, Pairs
from unbroken.inspection.formats.pieces import CutTensor, Piece, Place
from unbroken.inspection.formats.views import TORCH_DTYPES, integers

# Some 90 opcodes speak of a piece, and large models have a million pieces.
_MOST_OPCODES = 100_000_000
_LARGEST_BYTES = 512 << 20
_MOST_PIECES = 5_000_000
_LONGEST_PATH, _DEEPEST_PATH = 4096, 64
_MOST_PATH_CHARACTERS = 1 << 27


@dataclass(slots=True, kw_only=True)
class Layout:
    """What is in a checkpoint, by the names that it has there.

    `paths` are the keys of the nested state that a name was made of. `unread` says why a tensor is not read.
    """

    tensors: dict[str, CutTensor] = field(default_factory=dict)
    values: dict[str, Place | None] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    version: str | None = None

    def places(self) -> Iterator[tuple[str, Place]]:
        """Yield every place, with the name of what lies there."""
        for name, tensor in self.tensors.items():
            yield from ((name, piece.place) for piece in tensor.pieces if piece.place is not None)
        yield from ((name, place) for name, place in self.values.items() if place is not None)


def read_layout(file: RegularFile) -> Layout:
    """Return what the metadata in `file` describe. Raises DamagedError."""
    where = str(file.path)
    if file.size_bytes > _LARGEST_BYTES:
        raise damaged(where, f"at most {_LARGEST_BYTES} bytes", f"{file.size_bytes}")
    machine = Machine(file.read(0, file.size_bytes), where, most_opcodes=_MOST_OPCODES)
    said = _fields(machine.load(), "Metadata", where)
    places = _Places(_pairs(said.get("storage_data"), f"{where}: storage_data"), where)
    version = said.get("version")
    layout = Layout(version=encodable(version) if isinstance(version, str) else None)
    for name, entry in _pairs(said.get("state_dict_metadata"), f"{where}: state_dict_metadata"):
        if not isinstance(name, str):
            raise damaged(where, "names", type(name).__name__)
        _enter(layout, name, entry, places, where)
    layout.paths = _paths(said.get("planner_data"), layout)
    return layout


class _Places:
    """Where the pieces lie, by their name and where they begin in their tensor."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]], where: str) -> None:
        self._found: dict[tuple[str, str], Place] = {}
        self._left = _MOST_PIECES
        self._where = where
        for index, info in pairs:
            key = _fields(index, "MetadataIndex", where)
            name, offset = key.get("fqn"), key.get("offset")
            if not isinstance(name, str):
                raise damaged(where, "the name of a piece", type(name).__name__)
            self._found[name, "" if offset is None else str(integers(offset))] = _place(info, where)

    def of(self, name: str, offsets: tuple[int, ...] | None) -> Place | None:
        self._left -= 1
        if self._left < 0:
            raise damaged(self._where, f"at most {_MOST_PIECES} pieces", "more")
        found = self._found.get((name, "" if offsets is None else str(offsets)))
        # Of a tensor in one piece, the first releases did not say where it begins.
        return self._found.get((name, "")) if found is None and not any(offsets or ()) else found


def _enter(layout: Layout, name: str, entry: Any, places: _Places, where: str) -> None:
    kind = _kind(entry)
    if kind == "BytesStorageMetadata":
        layout.values[name] = places.of(name, None)
        return
    said = _fields(entry, "TensorStorageMetadata", where)
    dtype, shape = _dtype(said.get("properties")), integers(said.get("size"))
    known = TORCH_DTYPES.get(dtype)
    size = None if known is None or shape is None else tensor_bytes(known, shape)
    if known is None or shape is None or size is None:
        layout.unread[name] = (
            f"elements of the kind {dtype or '(none)'}" if known is None else "no tensor has such a shape"
        )
        return
    chunks = said.get("chunks")
    if not isinstance(chunks, list):
        raise damaged(f"{where}: tensor {encodable(name)}", "a list of its pieces", type(chunks).__name__)
    pieces = tuple(_piece(name, chunk, len(shape), places, where) for chunk in chunks)
    layout.tensors[name] = CutTensor(dtype=known, shape=shape, size_bytes=size, pieces=pieces)


def _piece(name: str, chunk: Any, dimensions: int, places: _Places, where: str) -> Piece:
    said = _fields(chunk, "ChunkStorageMetadata", where)
    offsets, sizes = integers(said.get("offsets")), integers(said.get("sizes"))
    if offsets is None or sizes is None or not len(offsets) == len(sizes) == dimensions:
        raise damaged(f"{where}: tensor {encodable(name)}", f"pieces of {dimensions} dimensions", "others")
    return Piece(offsets=offsets, sizes=sizes, place=places.of(name, offsets))


def _place(info: Any, where: str) -> Place:
    said = _fields(info, "_StorageInfo", where)
    match said.get("relative_path"), said.get("offset"), said.get("length"):
        case str(file), int(start), int(size_bytes) if start >= 0 and size_bytes >= 0:
            transforms = said.get("transform_descriptors") or ()
            words = transforms if isinstance(transforms, list | tuple) else (transforms,)
            return Place(
                file=encodable(file),
                start=start,
                size_bytes=size_bytes,
                transforms=tuple(encodable(str(word)[:_LONGEST_PATH]) for word in words[:8]),
            )
    raise damaged(where, "the place of a piece", "something else")


def _dtype(properties: Any) -> str:
    """Return the name that torch has for the dtype: it is the first item of the state, or a field of it."""
    state = properties.state if isinstance(properties, Object) else None
    if isinstance(state, Pairs):
        state = tuple(value for key, value in state.pairs if key == "dtype")
    dtype = state[0] if isinstance(state, tuple) and state else None
    return encodable(dtype.name) if isinstance(dtype, Global) else ""


def _paths(planner_data: Any, layout: Layout) -> dict[str, tuple[str | int, ...]]:
    found: dict[str, tuple[str | int, ...]] = {}
    left = _MOST_PATH_CHARACTERS
    for name, path in planner_data.pairs if isinstance(planner_data, Pairs) else ():
        is_known = isinstance(name, str) and (name in layout.tensors or name in layout.values)
        if not is_known or not isinstance(path, tuple) or not 0 < len(path) <= _DEEPEST_PATH:
            continue
        if not all(isinstance(key, str) or type(key) is int for key in path):
            continue
        length = sum(len(key) if isinstance(key, str) else 1 + key.bit_length() // 3 for key in path)
        left -= length
        if length <= _LONGEST_PATH and left >= 0:
            found[name] = tuple(encodable(key) if isinstance(key, str) else key for key in path)
    return found


def _kind(node: Any) -> str:
    return node.kind.rpartition(".")[2] if isinstance(node, Object) else type(node).__name__


def _fields(node: Any, kind: str, where: str) -> dict[str, Any]:
    """Return the fields of an object of a class of that name. Raises DamagedError if it is none."""
    if not isinstance(node, Object) or _kind(node) != kind or not isinstance(node.state, Pairs):
        raise damaged(where, f"a {kind}", encodable(_kind(node)))
    return {key: value for key, value in node.state.pairs if isinstance(key, str)}


def _pairs(node: Any, where: str) -> Sequence[tuple[Any, Any]]:
    if not isinstance(node, Pairs):
        raise damaged(where, "a dictionary", type(node).__name__)
    return node.pairs
