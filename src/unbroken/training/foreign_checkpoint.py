"""States from files of other libraries as a checkpoint that a restore reads like one of our own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.checkpoint.digest import ALGORITHM, digest
from unbroken.checkpoint.manifest import Manifest, PartEntry, Position, TensorEntry
from unbroken.checkpoint.reader import read_into, read_tensors
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import DamagedError
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, TensorSource, copy_bytes, size_bytes
from unbroken.state.tree import Encoder
from unbroken.storage.local import LocalStorage
from unbroken.training import families
from unbroken.training.part import Part


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint(Checkpoint):
    """A checkpoint whose tensors are `sources`, by paths; each is held against the digest that it had."""

    sources: Mapping[str, TensorSource] = field(default_factory=dict)

    def load_tensors(self, paths: Iterable[str] | None = None) -> dict[str, HostTensor]:
        wanted = self.manifest.tensors if paths is None else paths
        return {
            path: HostTensor(entry.dtype, entry.shape, memoryview(self._read(path)))
            for path in wanted
            if (entry := self.manifest.tensors[path])
        }

    def load_into(self, memory: Mapping[str, memoryview]) -> None:
        for path, view in memory.items():
            view[:] = self._read(path)

    def _read(self, path: str) -> bytearray:
        data, entry = copy_bytes(self.sources[path]), self.manifest.tensors[path]
        if digest(data) != entry.digest:
            raise DamagedError(
                f"{self.name}: {path}: expected the bytes that were read before, found others",
                hint="let nobody write to the checkpoint while a run begins from it",
            )
        return data


@dataclass(frozen=True, slots=True)
class CheckpointAt(Checkpoint):
    """A checkpoint of our own in a directory of any name, as a copy may lie."""

    def load_tensors(self, paths: Iterable[str] | None = None) -> dict[str, HostTensor]:
        return read_tensors(self.storage, self.name, self.manifest, paths)

    def load_into(self, memory: Mapping[str, memoryview]) -> None:
        read_into(self.storage, self.name, self.manifest, memory)


def foreign_checkpoint(
    source: Path, states: Mapping[str, tuple[Part, Any]], strangers: Mapping[str, str], *, step: int
) -> ForeignCheckpoint:
    """Return a checkpoint with the `states` of parts, in the form that their handlers have them in.

    `strangers` are the kinds of states that no part of the program has, by name. All tensors are read.
    """
    table, codecs = TensorTable(), families.codecs()
    entries = {
        name: PartEntry(
            handler=part.handler.name,
            type=f"{type(part.value).__module__}.{type(part.value).__qualname__}",
            state=Encoder(table, codecs, keep_aliases=part.tensors.are_tied).encode(state, name),
        )
        for name, (part, state) in states.items()
    }
    entries |= {name: PartEntry(handler=kind, type="", state={}) for name, kind in strangers.items()}
    manifest = Manifest(
        format="",
        format_version=0,
        run_id="",
        step=step,
        revision=0,
        attempt=0,
        created="",
        parent=None,
        digest_algorithm=ALGORITHM,
        position=Position(epoch=0, inside_epoch=False, loaders=[]),
        metrics={},
        config=None,
        environment={},
        parts=entries,
        shards={},
        tensors=_entries(table),
    )
    return ForeignCheckpoint(LocalStorage(source.parent), str(source), manifest, table.sources)


def _entries(table: TensorTable) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    # A file may mean one tensor in any number of places.
    digests: dict[Hashable, str] = {}
    for path, tensor in table.sources.items():
        identity = tensor.identity or path
        if identity not in digests:
            digests[identity] = digest(copy_bytes(tensor))
        shape = tuple(tensor.shape)
        found[path] = TensorEntry(
            dtype=tensor.dtype,
            shape=shape,
            file="",
            offset=0,
            size_bytes=size_bytes(tensor.dtype, shape),
            digest=digests[identity],
            aliases=tuple(table.aliases.get(path, ())),
        )
    return found
