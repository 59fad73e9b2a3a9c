"""From a checkpoint of any format to safetensors and JSON: one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.container import ShardPlan, plan_shard
from unbroken.errors import UnbrokenError, UsageError
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.rundir.journal import finite
from unbroken.state.tensors import ITEM_BYTES, TensorSource
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

SUFFIX = ".safetensors"
_VALUES_SUFFIX = ".json"
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written, and a line for each thing that was not."""

    tensors: int
    size_bytes: int
    files: tuple[Path, Path]
    dropped: tuple[str, ...]


class UnreadTensor(TensorSource):
    """A tensor of a checkpoint, read when its bytes are asked for."""

    __slots__ = ("_path", "_reader", "dtype", "shape")

    def __init__(self, reader: CheckpointReader, path: str) -> None:
        self.dtype, self.shape = reader.tensors[path].dtype, reader.tensors[path].shape
        self._reader = reader
        self._path = path

    @property
    def identity(self) -> Hashable | None:
        return None

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.data

    @property
    def data(self) -> memoryview:
        return self._reader.read(self._path)


def convert(reader: CheckpointReader, target: Path) -> Conversion:
    """Write the tensors of `reader` to the safetensors file `target`, and all else to a JSON file beside it.

    Names stay as they are, and so does every bit. Nothing that exists is overwritten; if it fails, nothing
    is left.

    Raises:
        UsageError: `target` is no name for such a file, or one of the two is there already.
        DamagedError: a tensor is not all there.
    """
    files = target, target.with_suffix(_VALUES_SUFFIX)
    _check_target(reader, files)
    tensors = {
        path: UnreadTensor(reader, path)
        for path, entry in reader.tensors.items()
        if entry.dtype in ITEM_BYTES and path != METADATA
    }
    dropped = tuple(_dropped(reader))
    plan = plan_shard(target.name, tensors)
    storage = LocalStorage(target.absolute().parent)
    try:
        storage.write(files[1].name, [_values(reader, dropped)])
        storage.write(target.name, file_chunks(plan, tensors))
    except BaseException:
        # Also after an interrupt: one file without the other looks like a whole checkpoint.
        with suppress(UnbrokenError):
            storage.delete(files[1].name)
        raise
    return Conversion(tensors=len(tensors), size_bytes=plan.size_bytes, files=files, dropped=dropped)


def _check_target(reader: CheckpointReader, files: tuple[Path, Path]) -> None:
    if reader.problems:
        found = reader.problems[0]
        raise UsageError(
            f"{reader.path}: expected a complete checkpoint, found {found.file}: {found.problem}",
            hint="`unbroken verify` names all that is damaged",
        )
    check_name(files[0])
    for file in files:
        if file.exists() or file.is_symlink():
            raise UsageError(f"{file}: exists already", hint="nothing is overwritten: give another name")


def check_name(target: Path) -> None:
    """Raise UsageError unless a file of tensors can have the name `target`."""
    if target.suffix != SUFFIX:
        raise UsageError(
            f"{target}: expected a name that ends with {SUFFIX}", hint="tensors are written in that format"
        )
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory", hint="make it first")


def file_chunks(plan: ShardPlan, tensors: Mapping[str, UnreadTensor]) -> Iterator[Buffer]:
    """Yield the bytes of the file that `plan` lays out; each tensor is read when it is its turn."""
    yield plan.header
    for path in plan.placements:
        yield tensors[path].data


def _dropped(reader: CheckpointReader) -> Iterator[str]:
    for path, entry in reader.tensors.items():
        if path == METADATA:
            yield f"tensor {path}: in safetensors this name means something else"
        elif entry.dtype not in ITEM_BYTES:
            yield f"tensor {path}: safetensors has no {entry.dtype}"
    for name in reader.facts.get("objects", []):
        yield f"objects of {name}: kept as their name, arguments and fields in the JSON file"
    yield from reader.notes


def _values(reader: CheckpointReader, dropped: tuple[str, ...]) -> bytes:
    found: dict[str, Any] = {
        "converted_from": {"file": reader.path.name, "format": reader.format},
        "aliases": {path: list(entry.aliases) for path, entry in reader.tensors.items() if entry.aliases},
        "dropped": list(dropped),
        "facts": reader.facts,
        "values": reader.values,
    }
    return json.dumps(finite(found), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
