"""Verification: is every byte of a checkpoint what was written? It reads, and repairs nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from unbroken.checkpoint.finding import Finding as Finding  # noqa: PLC0414 - it is what this returns
from unbroken.checkpoint.manifest import Manifest, ShardEntry, TensorEntry
from unbroken.checkpoint.reader import check_shard, read_manifest, shards
from unbroken.checkpoint.stream import stream_tensors
from unbroken.errors import DamagedError
from unbroken.rundir import layout
from unbroken.storage.base import Storage

# Of each shard, so much is read for a sample.
_SAMPLED_SHARE = 0.1

_Members = dict[str, TensorEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found in one checkpoint; no findings means that every byte is as it was written."""

    name: str
    files: int
    tensors: int
    size_bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_intact(self) -> bool:
        return not self.findings


def verify_checkpoint(storage: Storage, tree: str) -> Verification:
    """Read the whole checkpoint at key `tree` and report everything that is damaged.

    Raises FormatVersionError for a newer format, StorageError when the storage itself fails.
    """
    return _verify(storage, tree, lambda members: members)


def verify_sample(storage: Storage, tree: str) -> Verification:
    """The same for its manifest, the header of each shard, and whole tensors that are a tenth of its bytes.

    They are drawn by the name of the checkpoint, others in each: a tensor that is much larger than the others
    is all of a sample, or none of it.
    """
    # Not by the generator of the process, which belongs to the script.
    drawn = random.Random(tree)
    return _verify(storage, tree, lambda members: _some(members, drawn))


def _some(members: _Members, drawn: random.Random) -> _Members:
    wanted = _SAMPLED_SHARE * sum(entry.size_bytes for entry in members.values())
    found: _Members = {}
    for path in drawn.sample(sorted(members), len(members)):
        found[path] = members[path]
        wanted -= members[path].size_bytes
        if wanted <= 0 and members[path].size_bytes:
            break
    return found


def _verify(storage: Storage, tree: str, choose: Callable[[_Members], _Members]) -> Verification:
    name = tree.rpartition("/")[2]
    try:
        manifest = read_manifest(storage, tree)
    except DamagedError as error:
        return Verification(
            name=name,
            files=0,
            tensors=0,
            size_bytes=0,
            findings=(Finding(file=layout.MANIFEST, problem=error.message),),
        )
    findings: list[Finding] = []
    for file, (shard, members) in shards(manifest).items():
        key, algorithm = f"{tree}/{file}", manifest.digest_algorithm
        findings += _verify_shard(storage, key, shard, members, choose(members), algorithm)
    findings += _strangers(storage, tree, manifest)
    return Verification(
        name=name,
        files=len(manifest.shards) + 2,
        tensors=len(manifest.tensors),
        size_bytes=manifest.size_bytes,
        findings=tuple(findings),
    )


def _verify_shard(
    storage: Storage, key: str, shard: ShardEntry, members: _Members, chosen: _Members, algorithm: str
) -> list[Finding]:
    file = key.rpartition("/")[2]
    try:
        check_shard(storage, key, shard, members, algorithm=algorithm)
        damaged = stream_tensors(storage, key, chosen, {}, algorithm=algorithm)
    except DamagedError as error:
        return [Finding(file=file, problem=error.message.removeprefix(f"{key}: "))]
    return [
        Finding(file=file, problem=f"tensor {path}: its bytes are not those that were saved")
        for path in damaged
    ]


def _strangers(storage: Storage, tree: str, manifest: Manifest) -> list[Finding]:
    known = {layout.MANIFEST, layout.MANIFEST_DIGEST, *manifest.shards}
    return [
        Finding(file=name, problem="the manifest does not know this file")
        for name in storage.list(tree)
        if name not in known
    ]
