"""A checkpoint of another library, read by our readers: nested plain values with tensors in their places."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import DamagedError, UsageError
from unbroken.inspection.detect import CheckpointReader, is_foreign, open_checkpoint
from unbroken.state.tensors import ITEM_BYTES, TensorSource

# Formats that have states in the form of torch, by how their readers call them.
_OF_TORCH = frozenset(
    {
        "torch.save, zip",
        "torch.save, before zip",
        "Lightning, torch.save",
        "safetensors",
        "safetensors, sharded",
        "Hugging Face Trainer",
        "Accelerate",
    }
)
_REFERENCE = "$tensor"
# Tensors take no more than their file has, but for those that show the same numbers again and again.
_MOST_REPEATED_BYTES = 256 << 20
_MOST_BITS = 128
# How readers end the note that something is so deep or so much that words stand in its place.
_CUT = "the rest is not shown"


class FileTensor(TensorSource):
    """A tensor in a file, read whenever its bytes are asked for."""

    __slots__ = ("_reader", "dtype", "path", "shape", "size_bytes", "where")

    def __init__(self, reader: CheckpointReader, path: str) -> None:
        entry = reader.tensors[path]
        self._reader = reader
        self.path = path
        self.dtype = entry.dtype
        self.shape = entry.shape
        self.size_bytes = entry.size_bytes
        self.where = entry.where

    @property
    def identity(self) -> Hashable | None:
        """The path in the file: tied weights have one."""
        return (id(self._reader), self.path)

    @property
    def library(self) -> str | None:
        return "torch"

    def copy_to(self, target: memoryview) -> None:
        target[:] = self._reader.read(self.path)


class ForeignFile:
    """The checkpoint at `path`: `values` are those in it, a FileTensor for each tensor.

    All of it was read once and held against its checksums. Raises UsageError for what is no checkpoint in
    the form of torch, DamagedError for one that is not whole.
    """

    def __init__(self, path: Path) -> None:
        reader = open_checkpoint(path)
        if reader.format not in _OF_TORCH:
            raise UsageError(
                "Run: expected start_from= to be a checkpoint of torch.save, Lightning, the Trainer of "
                f"Hugging Face, Accelerate or safetensors, found {path}, which is {reader.format}",
                hint="for weights alone there is unbroken.warm_start; `unbroken convert` makes safetensors",
            )
        found = next(iter(reader.problems), None) or next(iter(reader.verify()), None)
        if found is not None:
            raise DamagedError(
                f"{reader.path}: {found.file}: expected a whole checkpoint, found {found.problem}",
                hint="`unbroken verify` lists all that is damaged; begin from another checkpoint",
            )
        for note in reader.notes:
            if note.endswith(_CUT):
                raise UsageError(
                    f"{reader.path}: expected an ordinary training state, found values {note}",
                    hint="save the state_dicts alone, as torch.save({'model': ..., 'optimizer': ...}, path)",
                )
        _check_size(reader)
        self.source = str(reader.path)
        self.format = reader.format
        self.values: dict[str, Any] = _values(reader)


def is_foreign_file(path: Path) -> bool:
    """Tell whether another library may have written what is at `path`."""
    return path.exists() and is_foreign(path)


def _check_size(reader: CheckpointReader) -> None:
    size = sum(entry.size_bytes for entry in reader.tensors.values())
    most = sum(reader.files.values()) + _MOST_REPEATED_BYTES
    if size > most:
        raise UsageError(
            f"{reader.path}: expected at most {most} bytes of tensors in files of this size, found {size}",
            hint="save tensors that repeat a few numbers as what they are made of, or contiguous",
        )


def _values(reader: CheckpointReader) -> dict[str, Any]:
    met: set[str] = set()

    def with_tensors(value: Any) -> Any:
        if isinstance(value, list):
            return [with_tensors(item) for item in value]
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return {"$object": "int"}
        if not isinstance(value, dict):
            return value
        path = value.get(_REFERENCE)
        if isinstance(path, str) and path in reader.tensors and value.keys() <= {_REFERENCE, "attributes"}:
            met.add(path)
            return _tensor(reader, path)
        return {key: with_tensors(item) for key, item in value.items()}

    said = with_tensors(reader.values)
    values: dict[str, Any] = said if isinstance(said, dict) else {}
    is_folder = reader.path.is_dir()
    for path in reader.tensors.keys() - met:
        # Of formats that have tensors by name and nothing else; in a folder, below their part.
        part, separator, name = path.partition("/")
        if not (is_folder and separator):
            values.setdefault(path, _tensor(reader, path))
        elif isinstance(below := values.setdefault(part, {}), dict):
            below.setdefault(name, _tensor(reader, path))
    return values


def _tensor(reader: CheckpointReader, path: str) -> Any:
    # Numbers of a kind that no part keeps, such as quantized ones: shown as what they are.
    known = reader.tensors[path].dtype in ITEM_BYTES
    return FileTensor(reader, path) if known else {"$object": f"tensor of {reader.tensors[path].dtype}"}


def objects_in(value: Any, where: str = "") -> Mapping[str, str]:
    """Return, by where they stand in `value`, the classes of objects that are not read."""
    if isinstance(value, dict) and "$object" in value:
        return {where: str(value["$object"])}
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    found: dict[str, str] = {}
    for key, item in items:
        if isinstance(item, dict | list):
            found |= objects_in(item, f"{where}.{key}" if where else str(key))
    return found
