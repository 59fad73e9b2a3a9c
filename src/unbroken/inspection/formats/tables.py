"""TensorFlow's first checkpoints: a single table with all tensors in it (`write_version=1`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unbroken.checkpoint.finding import Finding
from unbroken.errors import CheckpointError, DamagedError
from unbroken.inspection.formats.base import RegularFile, SingleFileReader, StoredTensor, damaged, unreadable
from unbroken.interchange.marks import is_table
from unbroken.interchange.protobuf import content, fields, number, text
from unbroken.interchange.table import Table
from unbroken.interchange.tf_dtypes import element_type
from unbroken.interchange.tf_entries import parse_shape
from unbroken.interchange.tf_place import is_older


def is_older_checkpoint(file: RegularFile) -> bool:
    """Tell whether a file is a table that begins as such a checkpoint does."""
    if not is_table(file):
        return False
    try:
        key, value = next(Table(file).entries(), (b"?", memoryview(b"")))
    except CheckpointError:
        # An index with its data files was recognised before this is asked.
        return True
    return key == b"" and is_older(value)


class TensorFlowTable(SingleFileReader):
    """Such a file: its tensors are listed and its checksums verified, and their numbers are not read."""

    format = "TensorFlow checkpoint, of names, in a single file"
    checksums = "CRC-32C of each block"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes = ["tensors of this old format are listed, and not read: save them again with TensorFlow"]
        _, value = next(Table(self._file).entries(), (b"", memoryview(b"")))
        for tag, item in fields(value, str(path)):
            if tag == 1:
                self._enter_all(content(item, str(path)))

    def read(self, path: str) -> memoryview:
        """Raise StorageError: no tensor of this format is read."""
        raise unreadable(path, f"tensors of a {self.format} are not read")

    def verify(self) -> Iterator[Finding]:
        """Read every block against its checksum."""
        try:
            for _ in Table(self._file).entries():
                pass
        except DamagedError as error:
            yield Finding(file=self.path.name, problem=error.message)

    def _enter_all(self, message: memoryview) -> None:
        for tag, item in fields(message, str(self.path)):
            if tag == 1:
                self._enter(content(item, str(self.path)))

    def _enter(self, message: memoryview) -> None:
        where = str(self.path)
        found = dict(fields(message, where))
        name = text(found.get(1, memoryview(b"")), where)
        shape = parse_shape(content(found.get(2, memoryview(b"")), where), where)
        element = element_type(number(found.get(3, 0), where))
        if not element.is_number:
            self.notes.append(f"not read as tensors: {name}, {element.name} of {shape}")
            return
        if name in self.tensors:
            raise damaged(where, "each tensor once", f"{name} twice")
        size = element.item_bytes or 0
        for length in shape:
            size *= length
        self.tensors[name] = StoredTensor(
            dtype=element.dtype, shape=shape, size_bytes=size, where=self.path.name
        )
