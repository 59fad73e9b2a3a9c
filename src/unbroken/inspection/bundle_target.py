"""TensorFlow's checkpoints of names, written: `tf.train.load_checkpoint` and `Saver.restore` read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.interchange.crc32c import crc32c, masked
from unbroken.interchange.marks import INDEX
from unbroken.interchange.protobuf import encoded_varint
from unbroken.interchange.table_writer import encoded_table
from unbroken.interchange.tf_dtypes import TF_NUMBERS
from unbroken.interchange.tf_graph import GRAPH
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

_DATA = ".data-00000-of-00001"
_LONGEST_NAME_BYTES = 1 << 12
# One file of data, numbers with their lowest byte first, the first version of the format.
_HEADER = bytes.fromhex("08011a020801")


class BundleTarget(Target):
    """A bundle with all tensors in one data file, under their paths."""

    suffix = INDEX

    def files(self, target: Path) -> tuple[Path, ...]:
        return target.with_name(target.name.removesuffix(INDEX) + _DATA), target

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        if entry.dtype not in TF_NUMBERS:
            return f"TensorFlow has no {entry.dtype}"
        if path == GRAPH or path.startswith("\0"):
            return "in TensorFlow this name means something else"
        if not path or len(path.encode()) > _LONGEST_NAME_BYTES:
            return f"TensorFlow takes names of 1 to {_LONGEST_NAME_BYTES} bytes"
        return None

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        data, index = self.files(target)
        # In the order of their bytes, which is that of the index.
        ordered = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))
        entries: list[tuple[bytes, bytes]] = [(b"", _HEADER)]
        size = storage.write(data.name, _data(ordered, entries))
        return size + storage.write(index.name, encoded_table(entries))


def _data(tensors: Mapping[str, UnreadTensor], entries: list[tuple[bytes, bytes]]) -> Iterator[Buffer]:
    """Yield the bytes of each tensor, and add where it lies to `entries`."""
    offset = 0
    for path, tensor in tensors.items():
        data = tensor.data
        entries.append((path.encode(), _entry(tensor, offset, data)))
        offset += len(data)
        yield data


def _entry(tensor: UnreadTensor, offset: int, data: memoryview) -> bytes:
    sizes = (b"\x08" + encoded_varint(length) if length else b"" for length in tensor.shape)
    shape = b"".join(b"\x12" + encoded_varint(len(size)) + size for size in sizes)
    return b"".join(
        (
            b"\x08" + encoded_varint(TF_NUMBERS[tensor.dtype]),
            b"\x12" + encoded_varint(len(shape)) + shape,
            b"\x20" + encoded_varint(offset) if offset else b"",
            b"\x28" + encoded_varint(len(data)) if data else b"",
            b"\x35" + masked(crc32c(data)).to_bytes(4, "little"),
        )
    )
