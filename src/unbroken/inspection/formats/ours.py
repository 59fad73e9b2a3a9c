"""Our own checkpoints: every byte carries a digest, and nothing is returned that does not match it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.finding import Finding
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.reader import check_shard, read_manifest, shards
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor, damaged
from unbroken.inspection.listing import facts
from unbroken.inspection.locate import Located
from unbroken.state.readable import readable


class OurCheckpoint(CheckpointReader):
    """A checkpoint of a run. Raises DamagedError, FormatVersionError if its manifest cannot be trusted."""

    format = "unbroken checkpoint"

    def __init__(self, located: Located) -> None:
        self._located = located
        self._manifest = read_manifest(located.storage, located.tree)
        self._checked: set[str] = set()
        self._algorithm = self._manifest.digest_algorithm
        self.checksums = f"{self._algorithm} of every byte"
        self.path = located.directory
        self.size_bytes = self._manifest.size_bytes
        self.files = {name: shard.size_bytes for name, shard in self._manifest.shards.items()}
        self.tensors = {
            path: StoredTensor(
                dtype=entry.dtype,
                shape=entry.shape,
                size_bytes=entry.size_bytes,
                where=entry.file,
                aliases=entry.aliases,
                digest=f"{self._algorithm}:{entry.digest}",
            )
            for path, entry in self._manifest.tensors.items()
        }
        self.values = {name: _plain(readable(entry.state)) for name, entry in self._manifest.parts.items()}
        self.facts = _facts(self._manifest)
        self.problems = list(self._missing())
        self.notes = []

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError unless they match their digest."""
        entry, storage, tree = self._manifest.tensors[path], self._located.storage, self._located.tree
        key = f"{tree}/{entry.file}"
        if entry.file not in self._checked:
            shard, members = shards(self._manifest)[entry.file]
            check_shard(storage, key, shard, members, algorithm=self._algorithm)
            self._checked.add(entry.file)
        data = storage.read(key, entry.offset, entry.size_bytes)
        if digest(data, self._algorithm) != entry.digest:
            raise damaged(f"{self.path}/{entry.file}: tensor {path}", "the bytes that were saved", "others")
        return memoryview(data)

    def verify(self) -> Iterator[Finding]:
        """Read everything against its digest."""
        told = {found.file for found in self.problems}
        for found in verify_checkpoint(self._located.storage, self._located.tree).findings:
            if found.file not in told:
                yield found

    def _missing(self) -> Iterator[Finding]:
        for name, shard in self._manifest.shards.items():
            size = self._located.storage.size(f"{self._located.tree}/{name}")
            if size is None:
                yield Finding(file=name, problem="this file is missing")
            elif size != shard.size_bytes:
                yield Finding(file=name, problem=f"expected {shard.size_bytes} bytes, found {size}")


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Return what a checkpoint says of itself and of training, but for what names this very one."""
    found = facts(msgspec.to_builtins(msgspec.structs.replace(manifest, tensors={})))
    return {
        "step": found["step"],
        "position": _plain(readable(msgspec.to_builtins(manifest.position))),
        "metrics": found["metrics"],
        "config": _plain(readable(manifest.config)),
        "environment": _plain(readable(manifest.environment)),
        "choices": _plain(readable(manifest.choices)),
        "non_finite": manifest.non_finite,
        "validation": found["validation"],
        "handlers": {name: entry.handler for name, entry in manifest.parts.items()},
    }


def _plain(value: Any) -> Any:
    """Return readable JSON with the references to tensors as in every other format."""
    if isinstance(value, dict):
        if isinstance(value.get("$tensor"), str):
            return {"$tensor": value["$tensor"]}
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
