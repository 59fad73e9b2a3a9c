"""Files of `torch.save`, written: a dictionary of tensors that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.inspection.formats.views import TORCH_DTYPES
from unbroken.interchange.pickle_writer import TORCH_NAMES, PickledTensor, pickled
from unbroken.interchange.zip_writer import ZipWriter
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

# What the entries lie below; torch takes any name for it.
_ROOT = "archive"
# Where torch has elements begin, so that they can be mapped into memory.
_ALIGNMENT = 64
_VERSION = b"3\n"
_KNOWN = TORCH_NAMES & frozenset(TORCH_DTYPES.values())
_QUANTIZED = frozenset({"QI8", "QU8", "QI32"})


class TorchTarget(Target):
    """One zip file with a flat dictionary of tensors. Tied ones share their storage."""

    suffix = ".pt"

    def files(self, target: Path) -> tuple[Path, ...]:
        return (target,)

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        if entry.dtype in _QUANTIZED:
            return f"torch has {entry.dtype} with its scale only"
        return None if entry.dtype in _KNOWN else f"torch has no {entry.dtype}"

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        return storage.write(target.name, _archive(reader, tensors))


def _archive(reader: CheckpointReader, tensors: Mapping[str, UnreadTensor]) -> Iterator[Buffer]:
    writer = ZipWriter()
    listed = [
        PickledTensor(
            names=(path, *reader.tensors[path].aliases),
            key=str(key),
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=reader.tensors[path].size_bytes,
        )
        for key, (path, tensor) in enumerate(tensors.items())
    ]
    # The pickle is the first, by which torch finds what the others lie below.
    for name, data in (("data.pkl", pickled(listed)), ("byteorder", b"little")):
        yield from writer.entry(f"{_ROOT}/{name}", [data], alignment=_ALIGNMENT)
    for key, tensor in enumerate(tensors.values()):
        yield from writer.entry(f"{_ROOT}/data/{key}", [tensor.data], alignment=_ALIGNMENT)
    yield from writer.entry(f"{_ROOT}/version", [_VERSION], alignment=_ALIGNMENT)
    yield from writer.end()
