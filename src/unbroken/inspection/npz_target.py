"""NumPy's `.npz`, written: `numpy.load` reads it without pickles."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.inspection.formats.views import NUMPY_DTYPES
from unbroken.interchange.zip_writer import LONGEST_NAME_BYTES, ZipWriter
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

_ENTRY = ".npy"
_MAGIC = b"\x93NUMPY\x01\x00"
_LENGTH = struct.Struct("<H")
# Headers end at a multiple of this, as NumPy has it, and so do those of their entries.
_ALIGNMENT = 64
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


class NpzTarget(Target):
    """One zip file with an array in each entry, as `numpy.savez` writes it."""

    suffix = ".npz"

    def files(self, target: Path) -> tuple[Path, ...]:
        return (target,)

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        if entry.dtype not in _NAMES:
            return f"NumPy has no {entry.dtype}"
        if not path or "\0" in path or len(path.encode()) > LONGEST_NAME_BYTES - len(_ENTRY):
            return "a zip file has no such names"
        # NumPy finds an array by the name of its entry, too.
        return f"NumPy takes {_ENTRY} off the end of names" if path.endswith(_ENTRY) else None

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        return storage.write(target.name, _archive(tensors))


def _archive(tensors: Mapping[str, UnreadTensor]) -> Iterator[Buffer]:
    writer = ZipWriter()
    for path, tensor in tensors.items():
        yield from writer.entry(path + _ENTRY, [_header(tensor), tensor.data], alignment=_ALIGNMENT)
    yield from writer.end()


def _header(tensor: UnreadTensor) -> bytes:
    """Return what stands before the elements of an array."""
    name = _NAMES[tensor.dtype]
    order = "|" if name.endswith("1") else "<"
    text = f"{{'descr': '{order}{name}', 'fortran_order': False, 'shape': {tensor.shape!r}, }}".encode()
    begun = len(_MAGIC) + _LENGTH.size
    size = -(-(begun + len(text) + 1) // _ALIGNMENT) * _ALIGNMENT - begun
    return _MAGIC + _LENGTH.pack(size) + text.ljust(size - 1) + b"\n"
