"""What `torch.save` writes: a zip file with one pickle, and the elements of each storage in an entry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.inspection.formats.base import (
    DTYPE_BITS,
    CheckpointReader,
    damaged,
    is_in_order,
    unreadable,
)
from unbroken.inspection.formats.constructors import read_values, unusual
from unbroken.inspection.formats.elements import needed_bytes, read_view, stored
from unbroken.inspection.formats.opcodes import Machine
from unbroken.inspection.formats.views import View, torch_storage
from unbroken.inspection.formats.zips import DOUBLED, ZipEntries

PICKLE = "data.pkl"
_LARGEST_PICKLE_BYTES = 1 << 30
# From this size on a pickle that was compressed to almost nothing is a bomb.
_LARGE_PICKLE_BYTES = 16 << 20
# The key by which Lightning's own checkpoints are told.
_LIGHTNING = "pytorch-lightning_version"


def pickle_entry(names: list[str]) -> str | None:
    """Return the entry with the pickle of what `torch.save` wrote, None if this is something else."""
    found = [name for name in names if name.count("/") == 1 and name.endswith(f"/{PICKLE}")]
    return found[0] if len(found) == 1 else None


class TorchZip(CheckpointReader):
    """A file of `torch.save`. Its pickle is read, and never executed."""

    def __init__(self, path: Path, entries: ZipEntries) -> None:
        self.path = path
        self._zip = entries
        sizes = entries.sizes()
        pickle = pickle_entry(list(sizes))
        if pickle is None:
            raise damaged(str(path), f"one entry {PICKLE}", "none")
        if sizes[pickle] > _LARGEST_PICKLE_BYTES:
            raise unreadable(entries.at(pickle), f"a pickle of {sizes[pickle]} bytes is not read")
        self._root = pickle.removesuffix(PICKLE)
        self.format = "TorchScript" if f"{self._root}constants.pkl" in sizes else "torch.save, zip"
        self.size_bytes = entries.file.size_bytes
        self.files = {path.name: self.size_bytes}
        self.checksums = "CRC-32 of each entry" if entries.has_checksums else None
        machine = Machine(entries.read(pickle, large_bytes=_LARGE_PICKLE_BYTES), entries.at(pickle))
        self.values, reading = read_values(machine.load(), torch_storage)
        version = self.values.get(_LIGHTNING) if isinstance(self.values, dict) else None
        if isinstance(version, str):
            self.format = "Lightning, torch.save"
        self._views: dict[str, View] = reading.tensors
        self._is_big_endian = self._byte_order(sizes) == b"big"
        self.tensors = {
            name: stored(view, self._entry(view), reading.aliases.get(name, ()))
            for name, view in self._views.items()
        }
        self.facts = {"objects": unusual(machine.globals), "attributes": reading.attributes}
        if isinstance(version, str):
            self.facts["metadata"] = {"Lightning": version, **_batches(self.values)}
        self.problems = list(self._problems(sizes))
        self.notes = reading.notes

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError if they are not all there."""
        view, entry = self._views[path], self._entry(self._views[path])
        if view.storage.data is None and entry not in self._zip.entries:
            raise damaged(f"{self.path}: tensor {path}", f"entry {entry}", "none")
        return read_view(
            view, lambda start, size: self._zip.read_range(entry, start, size), self._is_big_endian
        )

    def read_range(self, path: str, start: int, size_bytes: int) -> memoryview:
        """Return a range of the bytes of a tensor; of one that lies in order no other bytes are read."""
        view, entry = self._views[path], self._entry(self._views[path])
        is_big_endian = self._is_big_endian if view.big_endian is None else view.big_endian
        is_outside = view.storage.data is None and entry in self._zip.entries
        if is_big_endian or not (is_outside and is_in_order(view.shape, view.strides)):
            return self.read(path)[start : start + size_bytes]
        begin = view.offset * DTYPE_BITS[view.dtype] // 8 + start
        return memoryview(self._zip.read_range(entry, begin, size_bytes))

    def verify(self) -> Iterator[Finding]:
        """Read every entry against its checksum, which torch itself does not."""
        of_entry: dict[str, list[str]] = {}
        for path, view in self._views.items():
            of_entry.setdefault(self._entry(view), []).append(path)
        for found in self._zip.verify():
            tensors = of_entry.get(found.file)
            words = f"tensor {', '.join(tensors[:3])}: " if tensors else ""
            yield Finding(file=found.file, problem=f"{words}{found.problem}")

    def _entry(self, view: View) -> str:
        return f"{self._root}{PICKLE}" if view.storage.data is not None else self._at(view.storage.key)

    def _at(self, key: str) -> str:
        return f"{self._root}data/{key}"

    def _byte_order(self, sizes: dict[str, int]) -> bytes:
        name = f"{self._root}byteorder"
        return bytes(self._zip.read(name)) if 0 < sizes.get(name, 0) < 16 else b"little"

    def _problems(self, sizes: dict[str, int]) -> Iterator[Finding]:
        if self._zip.doubled:
            yield Finding(file=self.path.name, problem=DOUBLED)
        for path, view in self._views.items():
            if view.storage.data is not None:
                continue
            entry = self.tensors[path].where
            if entry not in sizes:
                yield Finding(file=entry, problem=f"tensor {path}: this entry is missing")
            elif sizes[entry] < needed_bytes(view):
                yield Finding(
                    file=entry,
                    problem=f"tensor {path}: expected {needed_bytes(view)} bytes, found {sizes[entry]}",
                )


def _batches(values: Any) -> dict[str, str]:
    """Return where in its epoch the loop of Lightning stood, which it keeps six levels deep."""
    found = values
    for key in ("loops", "fit_loop", "epoch_loop.batch_progress", "current", "completed"):
        found = found.get(key) if isinstance(found, dict) else None
    return {"batches of the epoch": str(found)} if type(found) is int else {}
