"""What `torch.save` wrote before it wrote zip files: five pickles, and then the elements of each storage."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import DTYPE_BITS, SingleFileReader, damaged, encodable
from unbroken.inspection.formats.constructors import read_values, unusual
from unbroken.inspection.formats.elements import needed_bytes, read_view, stored
from unbroken.inspection.formats.opcodes import Machine, Pairs
from unbroken.inspection.formats.views import Storage, View, torch_storage

_COUNT = struct.Struct("<q")
_LARGEST_PICKLE_BYTES = 1 << 30
# Most pickles are small beside the elements; more is read only if it turns out to be needed.
_FIRST_BYTES = 16 << 20


class TorchLegacy(SingleFileReader):
    """A file of `torch.save(_use_new_zipfile_serialization=False)`. It carries no checksum."""

    format = "torch.save, before zip"
    checksums = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._dtypes: dict[str, str] = {}
        machine, system, root, keys = self._pickles()
        self.values, reading = read_values(root, self._storage_of)
        self._views: dict[str, View] = reading.tensors
        self._is_big_endian = _is_big_endian(system)
        self._starts = self._find_elements(machine.position, keys)
        self.tensors = {
            name: stored(view, path.name, reading.aliases.get(name, ())) for name, view in self._views.items()
        }
        self.problems += self._missing()
        self.facts = {"objects": unusual(machine.globals), "attributes": reading.attributes}
        self.notes = reading.notes

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError if they are not all there."""
        view = self._views[path]
        begin, size = self._starts.get(view.storage.key, (0, 0))
        if view.storage.data is None and needed_bytes(view) > size:
            raise damaged(f"{self.path}: tensor {path}", f"{needed_bytes(view)} bytes", f"{size}")
        return read_view(
            view, lambda start, count: self._file.read(begin + start, count), self._is_big_endian
        )

    def verify(self) -> Iterator[Finding]:
        """Read everything; without checksums, only a disk that fails can be found."""
        for _ in self._file.pieces(0, self.size_bytes):
            pass
        yield from ()

    def _pickles(self) -> tuple[Machine, Any, Any, list[str]]:
        size = min(self.size_bytes, _FIRST_BYTES)
        while True:
            machine = Machine(self._file.read(0, size), str(self.path))
            try:
                _, _, system, root, keys = (machine.load() for _ in range(5))
                break
            except DamagedError:
                if size == min(self.size_bytes, _LARGEST_PICKLE_BYTES):
                    raise
                size = min(self.size_bytes, _LARGEST_PICKLE_BYTES)
        if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
            raise damaged(str(self.path), "the keys of its storages", "something else")
        return machine, system, root, [encodable(str(key)) for key in keys]

    def _storage_of(self, identity: Any) -> Storage | None:
        storage = torch_storage(identity)
        if storage is not None:
            self._dtypes.setdefault(storage.key, storage.dtype)
        return storage

    def _find_elements(self, position: int, keys: list[str]) -> dict[str, tuple[int, int]]:
        """Return where the elements of each storage begin, and how many bytes they have."""
        found: dict[str, tuple[int, int]] = {}
        why = "it was cut short"
        for key in keys:
            if position + _COUNT.size > self.size_bytes:
                break
            if key not in self._dtypes:
                # Of how many bytes an element is, and so where the next storage begins, nobody says.
                why = f"the elements of storage {key} are of no known kind"
                break
            (count,) = _COUNT.unpack(self._file.read(position, _COUNT.size))
            position += _COUNT.size
            size = count * DTYPE_BITS[self._dtypes[key]] // 8
            if count < 0 or position + size > self.size_bytes:
                break
            found[key] = (position, size)
            position += size
        if len(found) < len(keys):
            self.problems.append(
                Finding(file=self.path.name, problem=f"{len(found)} of {len(keys)} storages are found: {why}")
            )
        elif position < self.size_bytes:
            rest = self.size_bytes - position
            self.problems.append(
                Finding(file=self.path.name, problem=f"{rest} bytes at the end are nobody's")
            )
        return found

    def _missing(self) -> Iterator[Finding]:
        for path, view in self._views.items():
            size = self._starts.get(view.storage.key, (0, 0))[1]
            if view.storage.data is None and needed_bytes(view) > size:
                yield Finding(
                    file=self.path.name,
                    problem=f"tensor {path}: expected {needed_bytes(view)} bytes, found {size}",
                )


def _is_big_endian(system: Any) -> bool:
    pairs = system.pairs if isinstance(system, Pairs) else []
    return any(key == "little_endian" and value is False for key, value in pairs)
