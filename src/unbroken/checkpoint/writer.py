"""Writing a checkpoint: stage, then publish by one rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from contextlib import suppress

from unbroken.checkpoint.container import ShardPlan
from unbroken.checkpoint.digest import ALGORITHM, digest, seal
from unbroken.checkpoint.digests import CountNonFinite, Digests, bytes_at
from unbroken.checkpoint.envelope import FORMAT, FORMAT_VERSION
from unbroken.checkpoint.manifest import Manifest, ShardEntry, TensorEntry, encode_manifest
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.errors import StorageError, StorageFullError
from unbroken.rundir import layout
from unbroken.storage.base import Storage

# A shard that checkpoints share is one copy on the disk, whose damage harms them all: worth it only where
# it saves much.
_LEAST_SHARED_BYTES = 1 << 20
# What a manifest takes, about, and the files beside the shards: manifest, digest, directory.
_MANIFEST_BYTES_PER_TENSOR = 400
_OTHER_FILES = 3


def write_checkpoint(
    storage: Storage,
    snapshot: Snapshot,
    name: str,
    *,
    before_commit: Callable[[], None] = lambda: None,
    parent: Manifest | None = None,
    count_non_finite: CountNonFinite | None = None,
) -> Manifest:
    """Write `snapshot` as the checkpoint `name` and return its manifest.

    Readers see the whole checkpoint or none of it. `before_commit` is called when all bytes are
    durable and nothing is visible yet; what it raises ends the save. On any error the staged files
    are removed and the storage is as it was. A shard that is, byte for byte, one of `parent`, a
    checkpoint of this storage, is shared with it where the storage can. With `count_non_finite` the manifest
    names the tensors that are not finite and should be.
    """
    sharable = {plan.file for plan in snapshot.plans if _may_be_unchanged(snapshot, plan, parent)}
    _check_space(storage, snapshot, name, sharable)
    staging = f"{layout.CHECKPOINTS}/{layout.STAGING_PREFIX}{name}-{os.urandom(4).hex()}"
    try:
        digests = Digests(snapshot, count_non_finite)
        try:
            for plan in snapshot.plans:
                known = parent if plan.file in sharable else None
                _stage_shard(storage, snapshot, plan, staging, digests, known)
        finally:
            digests.join()
        manifest = _manifest(snapshot, name, digests)
        data = encode_manifest(manifest)
        storage.stage(f"{staging}/{layout.MANIFEST}", [data])
        storage.stage(f"{staging}/{layout.MANIFEST_DIGEST}", [_digest_line(data)])
        storage.sync(staging)
        before_commit()
        # Commit point: until this rename no reader looks into the staging directory.
        storage.move(staging, f"{layout.CHECKPOINTS}/{name}")
    except Exception:
        # The first error is the one to tell; what cannot be removed now, the next start sweeps.
        with suppress(StorageError):
            storage.delete(staging)
        raise
    return manifest


def _check_space(storage: Storage, snapshot: Snapshot, name: str, sharable: Set[str]) -> None:
    """Raise StorageFullError if there is not enough space: better than to fill the disk up first."""
    space = None
    # An estimate: where it cannot be made, writing shows what there is.
    with suppress(StorageError):
        space = storage.space()
    if space is None:
        return
    written = [plan for plan in snapshot.plans if plan.file not in sharable]
    tensors = sum(len(plan.placements) for plan in snapshot.plans)
    size = sum(plan.size_bytes for plan in written) + tensors * _MANIFEST_BYTES_PER_TENSOR
    files = len(snapshot.plans) + _OTHER_FILES
    if space.free_bytes < size or (space.free_files is not None and space.free_files < files):
        raise StorageFullError(
            f"{name}: expected {size:,} bytes and {files} files to be free on {storage}, "
            f"found {space.free_bytes:,} bytes and {space.free_files} files",
            hint="free space or inodes on that disk, or keep fewer checkpoints",
        )


def _stage_shard(
    storage: Storage,
    snapshot: Snapshot,
    plan: ShardPlan,
    staging: str,
    digests: Digests,
    parent: Manifest | None,
) -> None:
    target = f"{staging}/{plan.file}"
    is_shared = (
        parent is not None
        and _is_unchanged(plan, digests.of(plan.file), parent)
        and storage.size(_key_in(parent, plan)) == plan.size_bytes
        and storage.link(_key_in(parent, plan), target)
    )
    if not is_shared:
        storage.stage(target, [snapshot.images[plan.file]])


def _key_in(parent: Manifest, plan: ShardPlan) -> str:
    return f"{layout.CHECKPOINTS}/{layout.checkpoint_name(parent.step, parent.revision)}/{plan.file}"


def _may_be_unchanged(snapshot: Snapshot, plan: ShardPlan, parent: Manifest | None) -> bool:
    """Tell by one small tensor: most shards change as a whole, and then nothing has to wait for digests."""
    if parent is None or parent.digest_algorithm != ALGORITHM or plan.size_bytes < _LEAST_SHARED_BYTES:
        return False
    smallest = min(
        (path for path, placed in plan.placements.items() if placed.size_bytes),
        key=lambda path: plan.placements[path].size_bytes,
        default=None,
    )
    known = parent.tensors.get(smallest) if smallest is not None else None
    if smallest is None or known is None:
        return False
    return known.digest == digest(bytes_at(snapshot.images[plan.file], plan.placements[smallest]))


def _is_unchanged(plan: ShardPlan, digests: Mapping[str, str], parent: Manifest) -> bool:
    shard = parent.shards.get(plan.file)
    # The header names every tensor with its place: the same header, the same digests, the same file.
    return (
        shard is not None
        and (shard.size_bytes, shard.header_digest) == (plan.size_bytes, digest(plan.header))
        and all(parent.tensors[path].digest == found for path, found in digests.items())
    )


def _manifest(snapshot: Snapshot, name: str, digests: Digests) -> Manifest:
    parsed = layout.parse_checkpoint_name(name)
    assert parsed is not None, f"not a checkpoint name: {name}"
    said = snapshot.description
    shards, tensors = {}, {}
    for plan in snapshot.plans:
        shards[plan.file] = ShardEntry(
            size_bytes=plan.size_bytes, header_bytes=len(plan.header), header_digest=digest(plan.header)
        )
        found = digests.of(plan.file)
        for path, placed in plan.placements.items():
            tensors[path] = TensorEntry(
                dtype=placed.dtype,
                shape=placed.shape,
                file=plan.file,
                offset=placed.offset,
                size_bytes=placed.size_bytes,
                digest=found[path],
                aliases=tuple(snapshot.aliases.get(path, ())),
            )
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        run_id=said.run_id,
        step=said.step,
        revision=parsed[1],
        attempt=said.attempt,
        created=said.created,
        parent=said.parent,
        digest_algorithm=ALGORITHM,
        position=said.position,
        metrics=said.metrics,
        config=said.config,
        environment=said.environment,
        choices=said.choices,
        non_finite=digests.non_finite,
        validation=said.validation,
        rollbacks=said.rollbacks,
        health=said.health,
        ranks=said.ranks,
        parts=said.parts,
        shards=shards,
        tensors=tensors,
    )


def _digest_line(data: bytes) -> bytes:
    """The form that `b3sum --check` reads."""
    return f"{seal(data)}  {layout.MANIFEST}\n".encode()
