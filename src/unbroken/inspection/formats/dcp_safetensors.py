"""Weights that every rank wrote its blocks of: `HuggingFaceStorageWriter` of `torch.distributed.checkpoint`.

Each file of safetensors says in its metadata where its blocks begin. There is no index, and nothing says how
long the whole tensors are: they end where the last block does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError
from unbroken.inspection.detect import DCP_SHARD
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor, damaged, encodable, tensor_bytes
from unbroken.inspection.formats.pieces import CutTensor, Piece, Place, Tiling, paste
from unbroken.inspection.formats.safetensors import SafetensorsFile, inside
from unbroken.inspection.formats.views import integers
from unbroken.storage.failures import translated

_OFFSETS = "DCP_SHARDING_INFO"


class CutSafetensors(CheckpointReader):
    """A directory with the files of all ranks."""

    format = "safetensors, cut by torch.distributed.checkpoint"
    checksums = None

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.values = {}
        self.problems = []
        self.notes = [
            "it does not say how many ranks wrote it: without the last of them tensors look shorter"
        ]
        self._shards: dict[str, SafetensorsFile] = {}
        self._wrong: dict[str, str] = {}
        self._tensors: dict[str, CutTensor] = {}
        for name in _ranks(directory):
            self._open(name)
        self._put_together()
        self.files = {name: shard.size_bytes for name, shard in self._shards.items()}
        self.size_bytes = sum(self.files.values())
        self.tensors = {
            path: StoredTensor(
                dtype=tensor.dtype,
                shape=tensor.shape,
                size_bytes=tensor.size_bytes,
                where=", ".join(dict.fromkeys(piece.place.file for piece in tensor.pieces if piece.place)),
            )
            for path, tensor in self._tensors.items()
        }
        self.facts = {"metadata": {"ranks": str(len(self._shards))}}
        self.problems += [
            Finding(file=self.path.name, problem=f"tensor {at}: {why}") for at, why in self._wrong.items()
        ]
        self.problems += self._missing()

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, put together from its blocks. Raises DamagedError."""
        if path in self._wrong:
            raise damaged(f"{self.path}: tensor {path}", "blocks that tile it", self._wrong[path])
        tensor = self._tensors[path]
        # Before memory is taken for it: a header can claim any size.
        if tensor.size_bytes > self.size_bytes:
            raise damaged(f"{self.path}: tensor {path}", f"{tensor.size_bytes} bytes", f"{self.size_bytes}")
        target = bytearray(tensor.size_bytes)
        for piece in tensor.pieces:
            assert piece.place is not None, "each was found in a file"
            if 0 not in piece.sizes:
                paste(target, tensor, piece, self._shards[piece.place.file].read(path))
        return memoryview(target)

    def verify(self) -> Iterator[Finding]:
        """Read everything; without checksums, only a disk that fails can be found."""
        for shard in self._shards.values():
            yield from shard.verify()

    def _open(self, name: str) -> None:
        try:
            shard = SafetensorsFile(inside(self.path, name))
        except DamagedError as error:
            self.problems.append(Finding(file=name, problem=error.message))
            return
        self._shards[name] = shard
        self.problems += shard.problems

    def _put_together(self) -> None:
        found: dict[str, list[tuple[str, Piece]]] = {}
        for name, shard in self._shards.items():
            offsets = _offsets(shard)
            for path, entry in shard.tensors.items():
                said = offsets.get(path)
                at = integers(said.get("saved_offsets")) if isinstance(said, dict) else None
                if at is None or len(at) != len(entry.shape):
                    self.problems.append(
                        Finding(file=name, problem=f"tensor {path}: where it begins is not said")
                    )
                    continue
                place = Place(file=name, start=0, size_bytes=entry.size_bytes)
                found.setdefault(path, []).append(
                    (entry.dtype, Piece(offsets=at, sizes=entry.shape, place=place))
                )
        tiling = Tiling()
        for path, pieces in found.items():
            self._enter(path, pieces, tiling)

    def _enter(self, path: str, pieces: list[tuple[str, Piece]], tiling: Tiling) -> None:
        blocks = tuple(piece for _, piece in pieces)
        dtypes = sorted({dtype for dtype, _ in pieces})
        if len({len(block.sizes) for block in blocks}) != 1 or len(dtypes) != 1:
            self.problems.append(
                Finding(file=self.path.name, problem=f"tensor {path}: its blocks do not agree")
            )
            return
        ends = [[at + size for at, size in zip(block.offsets, block.sizes, strict=True)] for block in blocks]
        shape = tuple(map(max, zip(*ends, strict=True)))
        size = tensor_bytes(dtypes[0], shape)
        if size is None:
            self.problems.append(
                Finding(file=self.path.name, problem=f"tensor {path}: no tensor is like that")
            )
            return
        self._tensors[path] = CutTensor(dtype=dtypes[0], shape=shape, size_bytes=size, pieces=blocks)
        wrong = tiling.problem(shape, blocks)
        if wrong is not None:
            self._wrong[path] = wrong

    def _missing(self) -> Iterator[Finding]:
        names = [*self._shards, *(found.file for found in self.problems)]
        ranks = {int(match[1]) for name in names if (match := DCP_SHARD.fullmatch(name))}
        missing = [rank for rank in range(1, max(ranks, default=0)) if rank not in ranks]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield Finding(file=self.path.name, problem=f"the file of rank {missing[0] - 1}{more} is missing")


def _ranks(directory: Path) -> list[str]:
    with translated("list", str(directory)):
        return sorted(path.name for path in directory.iterdir() if DCP_SHARD.fullmatch(path.name))


def _offsets(shard: SafetensorsFile) -> dict[str, Any]:
    metadata = shard.facts.get("metadata", {})
    try:
        found = json.loads(metadata.get(_OFFSETS, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise damaged(str(shard.path), f"{_OFFSETS} as JSON", "something else")
    return {encodable(path): said for path, said in found.items()}
